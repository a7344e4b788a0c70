"""Collectives of a group that may break: the size is checked, and a silent member ends no wait.

Compared with: the traps of docs/torchft.md. Run alone: pytest tests/worker/elastic/test_group.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from worker.elastic.group import ElasticGroup
from worker.site import MembersChanged

pytest.importorskip("torchft", reason="torchft has no wheel for this machine")
CPU = torch.device("cpu")
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def form(store: dist.TCPStore, name: str, size: int = 2) -> list[ElasticGroup]:
    """All members of a group, each formed by a thread of its own."""

    def member(rank: int) -> ElasticGroup:
        address = f"127.0.0.1:{store.port}"
        return ElasticGroup.form(CPU, name=name, store=address, rank=rank, size=size, longest=HOUR)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(member, range(size)))


def both(
    groups: list[ElasticGroup], work: Callable[[ElasticGroup], torch.Tensor]
) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, groups))


def summed(group: ElasticGroup) -> torch.Tensor:
    value = torch.tensor([group.rank + 1.0])
    group.all_reduce_sum(value)
    return value


def test_ranks_are_those_of_the_meeting_not_those_of_the_process_group(
    store: dist.TCPStore,
) -> None:
    """torchft's process group says 0 on every rank."""
    groups = form(store, "a")
    assert [group.rank for group in groups] == [0, 1]
    assert both(groups, summed) == [torch.tensor([3.0])] * 2


def test_a_collective_over_another_number_of_members_is_refused(store: dist.TCPStore) -> None:
    """The trap of the restarted lighthouse: averages over 2 while 3 are counted."""
    groups = form(store, "a")
    for group in groups:
        group.size = 3
    value = torch.tensor([1.0])
    with pytest.raises(MembersChanged, match="has 2 members, not 3"):
        groups[0].all_reduce_sum(value)
    assert value == 1.0


def test_groups_of_two_names_on_one_store_never_meet(store: dist.TCPStore) -> None:
    """A name is random; the number of a quorum, which comes again, is no name."""
    first, second = form(store, "a"), form(store, "b")
    assert both(first, summed) == both(second, summed) == [torch.tensor([3.0])] * 2


def test_the_wait_for_a_silent_member_ends_with_an_alarm(store: dist.TCPStore) -> None:
    groups = form(store, "a")
    threading.Timer(0.3, lambda: groups[0].give_up("rank 1 was silent for 2 s")).start()
    started = time.monotonic()
    with pytest.raises(MembersChanged, match="rank 1 was silent"):
        summed(groups[0])
    assert time.monotonic() - started < 5.0
    with pytest.raises(MembersChanged, match="rank 1 was silent"):
        summed(groups[0])


def test_a_closed_connection_breaks_the_group_at_once(store: dist.TCPStore) -> None:
    groups = form(store, "a")
    dropping = groups[1].drop()
    assert dropping is not None
    dropping.join(10.0)
    with pytest.raises(MembersChanged):
        summed(groups[0])
    assert groups[0].lost


def test_a_member_that_does_not_come_forms_no_group(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.elastic.group.FORM_SECONDS", 1.0)
    with pytest.raises(MembersChanged, match="did not form"):
        ElasticGroup.form(
            CPU, name="a", store=f"127.0.0.1:{store.port}", rank=0, size=2, longest=HOUR
        )


def test_alone_there_is_nobody_to_lose() -> None:
    alone = ElasticGroup.form(CPU, name="a", store="nowhere:1", rank=0, size=1, longest=HOUR)
    assert summed(alone) == 1.0
