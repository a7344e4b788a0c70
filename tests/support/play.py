"""A run without I/O: the real round machine and the real Monitor, driven by events and a clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from coordinator.events import (
    Emit,
    Event,
    Reduce,
    RoundCommitted,
    Say,
    ShardStored,
    SiteJoined,
    SiteLeft,
    SiteReady,
)
from coordinator.machine import step
from coordinator.monitor import Monitor
from coordinator.state import initial_state
from coordinator.store import Store, rules_of
from loco.wire.v1 import coordinator_pb2 as pb


@contextlib.contextmanager
def playing(store: Store, first_round: int = 0) -> Iterator[Play]:
    """A Play that closes its store."""
    play = Play(store, first_round)
    try:
        yield play
    finally:
        play.close()


class Play:
    """Steps events as the engine does; a reduction is over at once."""

    def __init__(self, store: Store, first_round: int) -> None:
        self.now = 1_700_000_000.0  # Unix seconds, and the machine's clock
        self.store = store
        self.monitor = Monitor(store, clock=lambda: self.now)
        self.state = replace(
            initial_state(rules_of(store.config), ""),
            round=first_round,
            digests={first_round: f"theta{first_round}"},
        )

    def close(self) -> None:
        asyncio.run(self.monitor.close())
        self.store.close()

    def submit(self, event: Event) -> None:
        self.state, effects = step(self.state, event, self.now)
        self.monitor.observe(event, self.state)
        for effect in effects:
            match effect:
                case Emit(event=following):
                    self.submit(following)
                case Say():
                    self.monitor.observe(effect, self.state)
                case Reduce(round=round_):
                    self.submit(self._commit(round_))
                case refused:
                    raise AssertionError(f"{event} was answered {refused}")

    def _commit(self, round_: int) -> RoundCommitted:
        return RoundCommitted(
            round=round_, update_bytes=3000, update_digest="00", theta_digest=f"theta{round_ + 1}"
        )

    def join(self, site: str, instance: str = "a", ranks: int = 1) -> None:
        """Join, and hold theta of the current round."""
        self.submit(SiteJoined(site=site, instance=instance, num_shards=ranks))
        incarnation = self.state.sites[site].incarnation
        self.submit(SiteReady(site=site, incarnation=incarnation))

    def leave(self, site: str) -> None:
        incarnation = self.state.sites[site].incarnation
        self.submit(SiteLeft(site=site, incarnation=incarnation, reason="done"))

    def push(self, site: str, num_values: int = 100, size_bytes: int = 1000) -> None:
        """The whole contribution of a site of one rank, decoded and stored."""
        event = ShardStored(
            site=site,
            incarnation=self.state.sites[site].incarnation,
            round=self.state.round,
            fragment=0,
            shard=0,
            num_shards=1,
            size_bytes=size_bytes,
            digest="d",
            tokens=10,
            inner_steps=5,
            data_cursor=0,
        )
        self.monitor.contribution(event, num_values)
        self.submit(event)

    def beat(self, site: str, **fields: Any) -> None:
        incarnation = self.state.sites[site].incarnation
        caller = pb.Caller(run_id=self.store.run_id, site=site, incarnation=incarnation)
        self.monitor.heartbeat(pb.HeartbeatRequest(caller=caller, **fields))

    def value(self, name: str, **labels: str) -> float | None:
        """A sample of /metrics; None where there is none."""
        return self.monitor.registry.get_sample_value(name, labels)
