"""Contributions that are refused for their bytes or their content: what the site keeps and does.

Compared with: error feedback computed by NumPy, theta of a run in which nothing was refused, and
the journal. Run alone: pytest tests/integration/test_refused.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chaos.lives import Life
from chaos.numpy_site import Array, NumpySite, SiteThread
from chaos.runs import exact_run
from support.cluster import Cluster
from support.live import Coordinator, coordinating, eventually
from support.one_site import create

from coordinator.events import RoundClosed, RoundCommitted, ShardRefused, ShardStored
from coordinator.journal import Journal
from loco.config import Config
from loco.control import control
from loco.errors import EXIT_REFUSED, RefusedError
from loco.wire.v1 import coordinator_pb2 as pb
from worker.session import Session

ROUNDS, H, LIMIT, AT = 5, 2, 1000.0, 5  # AT: an element of the first parameter


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def config_of_run(**changes: dict[str, Any]) -> Config:
    raw = exact_run(seed=5, rounds=ROUNDS)
    raw["quorum"] |= {"min_sites": 1, "quarantine_after": 3}
    raw["outer"] = {"max_value": LIMIT}
    for section, keys in changes.items():
        raw[section] |= keys
    return Config.model_validate(raw)


def journal(coordinator: Coordinator, kind: type) -> list[Any]:
    events = (event for _, event in coordinator.store.journal.replay(after=0))
    return [event for event in events if isinstance(event, kind)]


def digests(coordinator: Coordinator) -> list[str]:
    return [event.theta_digest for event in journal(coordinator, RoundCommitted)]


# --- content ------------------------------------------------------------------------------------


class Damage:
    """A bit flips in a site's error feedback, once, while it waits for the update of round 1 or a
    later one, and so in the next contribution; EF before and after."""

    def __init__(self) -> None:
        self.life: Life
        self.round = -1
        self.before: Array | None = None
        self.a: Array | None = None  # beta * e + (theta - params) of the damaged contribution
        self.after: Array | None = None

    def __call__(self, what: str, round_: int) -> bool:
        exchange = self.life.worker._exchange
        if what == "after push" and self.a is None and round_ >= 1:
            exchange._ef[AT] = 3.0e38
            self.before = exchange._ef.copy()
        elif what == "before push" and self.a is None and self.before is not None:
            step = exchange._theta - exchange._anchor
            self.a, self.round = np.float32(0.95) * self.before + step, round_
        elif what == "asks" and self.a is not None and self.after is None:
            self.after = exchange._ef.copy()
        return False

    def check_ef(self) -> None:
        """All of the contribution is back in EF but for the one absurd value."""
        assert self.a is not None
        expected = np.where(np.abs(self.a) <= LIMIT, self.a, np.float32(0))
        assert np.flatnonzero(expected != self.a).tolist() == [AT]
        np.testing.assert_array_equal(self.after, expected)


def test_a_round_that_needs_the_site_gets_another_contribution_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage = Damage()
    with coordinating(create(tmp_path, config_of_run())) as coordinator:
        damage.life = Life(coordinator.address, "paris", is_over=damage)
        damage.life.finishes()
        (refused,) = journal(coordinator, ShardRefused)
        assert (refused.reason, refused.round) == ("absurd", 2)
        cursors = [event.data_cursor for event in journal(coordinator, ShardStored)]
        assert cursors == [H, 2 * H, 4 * H, 5 * H, 6 * H]  # the steps refused are in EF
        assert damage.life.worker._at.theta_digest == coordinator.state.theta_digest
        assert coordinator.state.sites["paris"].refusals == 0
    damage.check_ef()
    assert "contribution to round 2 refused, the site skips the round" in caplog.text
    assert "but for 1 values beyond 1000: the contribution of 'paris' has" in caplog.text


def test_a_round_that_does_not_need_it_closes_and_the_next_one_has_it_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="loco.worker")
    config = config_of_run(run={"rounds": 100_000}, quorum={"min_sites": 2})
    damage = Damage()
    with coordinating(create(tmp_path, config)) as coordinator:
        layout = coordinator.store.layout
        damage.life = Life(coordinator.address, "paris", is_over=damage)
        others = [
            SiteThread(NumpySite(coordinator.address, name, layout)) for name in ("kyoto", "oslo")
        ]
        eventually(lambda: 2 <= damage.round < coordinator.state.round - 2, "rounds go on", 60.0)
        control(coordinator.address, "drain", None)
        damage.life.finishes()
        for other in others:
            other.join()
        included = {event.round: event.included for event in journal(coordinator, RoundClosed)}
        assert included[damage.round] == ("kyoto", "oslo")
        assert included[damage.round + 1] == ("kyoto", "oslo", "paris")
        assert [e.round for e in journal(coordinator, ShardRefused)] == [damage.round]
        assert damage.life.worker._at.theta_digest == coordinator.state.theta_digest
    damage.check_ef()
    fate = f"round {damage.round}: contribution not included, kept in error feedback"
    assert fate in caplog.text


def test_refused_again_and_again_the_site_is_quarantined_and_ends_with_the_reason(
    tmp_path: Path,
) -> None:
    """Processes, two ranks, every contribution absurd: the third one in a row is the last."""
    changes = {"outer": {"max_value": 1e-9}, "quorum": {"min_sites": 1, "quarantine_after": 3}}
    with Cluster(tmp_path, **changes) as cluster:
        cluster.coordinator()
        paris = cluster.site("paris", ranks=2)
        assert paris.wait() == EXIT_REFUSED
        assert "Traceback" not in paris.output
        with contextlib.closing(Journal(cluster.state / "journal.sqlite")) as journal_:
            events = [event for _, event in journal_.replay(after=0)]
        refused = [e for e in events if isinstance(e, ShardRefused)]
        assert {(e.round, e.reason) for e in refused} == {(0, "absurd")}
        first, second, last = sorted({e.data_cursor for e in refused})
        # Of the last one the other rank's shard may come first: the leader's own is then refused
        # because the site is quarantined, and that is what it says.
        said = [first, second, *{e.data_cursor for e in refused if e.shard == 0} & {last}]
        told = "contribution to round 0 refused, the site skips the round"
        assert paris.output.count(told) == len(said)
        assert (
            "site 'paris' is quarantined: 3 of its contributions were refused in a row; an "
            "operator readmits it with: loco control HOST:PORT readmit paris"
        ) in paris.output
        (site,) = cluster.status()["sites"]
        assert site["status"] == "quarantined"
        again = cluster.site("paris", ranks=2, log="again")
        assert again.wait() == EXIT_REFUSED
        assert "is quarantined" in again.output


# --- bytes --------------------------------------------------------------------------------------


class Flipping:
    """Bits of so many pushes flip between digest and checksums: only the whole digest can tell."""

    def __init__(self, session: Session, pushes: int) -> None:
        self._messages = session._push_messages
        self._left = pushes
        session._push_messages = self  # type: ignore[method-assign,assignment]

    def __call__(
        self, header: pb.PushHeader, body: bytes, *others: Any
    ) -> Iterator[pb.PushRequest]:
        flip = self._left > 0
        self._left -= flip
        return self._messages(header, bytes([body[0] ^ flip]) + body[1:], *others)


def test_bytes_that_came_damaged_are_sent_again(tmp_path: Path) -> None:
    with coordinating(create(tmp_path / "sound", config_of_run())) as coordinator:
        Life(coordinator.address, "paris").finishes()
        undisturbed = digests(coordinator)
    with coordinating(create(tmp_path / "damaged", config_of_run())) as coordinator:
        paris = Life(coordinator.address, "paris")
        Flipping(paris.session, pushes=2)
        paris.finishes()
        assert digests(coordinator) == undisturbed
        assert [event.reason for event in journal(coordinator, ShardRefused)] == ["corrupt"] * 2
        assert coordinator.state.sites["paris"].refusals == 0


def test_bytes_that_come_damaged_again_and_again_quarantine_the_site(tmp_path: Path) -> None:
    with coordinating(create(tmp_path, config_of_run())) as coordinator:
        paris = Life(coordinator.address, "paris")
        Flipping(paris.session, pushes=100)
        error = paris.ends()
        assert isinstance(error, RefusedError)
        assert error.reason == "quarantined"
        assert "3 of its contributions were refused in a row" in str(error)
        assert len(journal(coordinator, ShardRefused)) == 3
        assert coordinator.state.sites["paris"].status == "quarantined"
