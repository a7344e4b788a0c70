"""A new member takes the state of one that trains on, in two parts, over real sockets.

Compared with: the digest of all that the other has in the end, and the bytes that had to come while
it stood still. Run alone: pytest tests/worker/elastic/test_healing.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from support.live import eventually
from support.runs import config_of

from loco.errors import LocoError
from loco.inner.groups import Group
from loco.layout import CHUNK
from loco.metrics import Catalogue, WireMetrics
from loco.model import layout_of, pack
from loco.wire.access import Access
from loco.wire.v1 import coordinator_pb2 as pb
from worker.elastic.healing import Healing, standing_of
from worker.elastic.host import Host, Rules
from worker.elastic.meeting import Standing
from worker.elastic.outer import ReplicatedExchange
from worker.elastic.quorum import Member
from worker.elastic.replica import WorkerReplica
from worker.elastic.wire import PIECE_BYTES
from worker.progress import Progress
from worker.pulse import Pulse
from worker.session import Session
from worker.site import Site
from worker.trainer import Trainer

RULES = Rules(target_size=2, start_seconds=5.0, heal_seconds=5.0)
PLAN = pb.RoundPlan(first_step=0, total_steps=100)
STANDING = Standing(version=7, label="g", rank=0, size=1, backup_of=0)


class Rank:
    """Everything of a worker that heals or is healed."""

    def __init__(self, corpus: str, *, dim: int = 64) -> None:
        model = {"dim": dim, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "seq_len": 16}
        config = config_of(
            model={**model, "ffn_dim": 4 * dim}, data={"batch": 2}, eval={"sequences": 2}
        )
        site = Site(torch.device("cpu"), Group(alone=True))
        self.trainer = Trainer(config, site, "paris", corpus)
        layout = layout_of(self.trainer.model)
        self.exchange = ReplicatedExchange(config, site, self.trainer.model, layout)
        self.exchange.load(pack(self.trainer.model, layout).tobytes(), 0)
        wire = WireMetrics(Catalogue(CollectorRegistry()))
        session = Session("127.0.0.1:1", "paris", 1.0, wire, Access())
        self.replica = WorkerReplica(self.trainer, self.exchange, Progress(), session, Pulse())


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOCO_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("pack my box with five dozen liquor jugs. " * 300)
    return str(path)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host("127.0.0.1", RULES)
    yield host
    host.close()


def fetch(host: Host, giver: Rank, taker: Rank) -> tuple[Healing, Member]:
    """The first part, while the giver could train."""
    member = Member.new(0, host.address)
    host.beside = giver.replica.give_beside
    healing = Healing(taker.replica, heal_seconds=5.0)
    healing.begin(member)
    eventually(lambda: healing.is_over, "the first part is here", 10.0)
    assert healing.prepared
    return healing, member


def settle(host: Host, giver: Rank) -> None:
    def source() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
        header, tensors = giver.replica.give()
        return {"standing": asdict(STANDING), "replica": header}, tensors

    host.source = source


def test_what_lasts_comes_beside_training_and_only_the_rest_while_the_others_wait(
    host: Host, corpus: str
) -> None:
    giver, taker = Rank(corpus), Rank(corpus)
    giver.trainer.train(2, PLAN)
    healing, member = fetch(host, giver, taker)
    lasting = sum(t.nbytes for t in giver.exchange.lasting().values())
    assert healing.bytes == lasting > 0
    giver.trainer.train(3, PLAN)  # after the first part: parameters and optimizer change
    settle(host, giver)
    header = healing.take(member)
    whole = sum(t.nbytes for t in giver.replica.give()[1].values())
    assert healing.bytes == whole, "nothing came twice"
    assert taker.replica.digest() == giver.replica.digest()
    assert standing_of(header) == Standing(version=7, label="g", rank=-1, size=1, backup_of=-1)


def test_what_an_update_changed_meanwhile_comes_again_and_nothing_else(
    host: Host, corpus: str
) -> None:
    """Torn or old: the pieces that are not as they must be are found by their digests."""
    giver, taker = Rank(corpus), Rank(corpus)
    healing, member = fetch(host, giver, taker)
    changed = giver.exchange.lasting()["error_feedback"]
    changed[CHUNK : CHUNK + 3] += 1.0
    settle(host, giver)
    healing.take(member)
    whole = sum(t.nbytes for t in giver.replica.give()[1].values())
    assert healing.bytes - whole == min(changed.nbytes, PIECE_BYTES), "one piece came twice"
    assert taker.replica.digest() == giver.replica.digest()


def test_a_source_that_dies_is_no_failure_and_one_that_gives_nothing_is(
    host: Host, corpus: str
) -> None:
    healing = Healing(Rank(corpus).replica, heal_seconds=1.0)
    assert not healing.prepared
    dead = Host("127.0.0.1", RULES)
    dead.close()
    healing.begin(Member.new(1, dead.address))
    eventually(lambda: healing.is_over, "the first source is gone", 10.0)
    assert not healing.prepared, "the next meeting names another"
    may_end = threading.Event()
    giver = Rank(corpus)

    def held_up() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
        may_end.wait(20.0)
        return giver.replica.give_beside()

    host.beside = held_up
    healing.begin(Member.new(0, host.address))
    eventually(lambda: healing.is_over, "the time-out", 10.0)
    with pytest.raises(LocoError, match=r"did not come from rank 0.*--heal-seconds"):
        assert healing.prepared
    may_end.set()
