"""The round machine under hypothesis's stateful testing: any events in any order, against a model.

The model is a plain record of what was accepted. Invariants: an accepted whole contribution of the
current round is never dropped; no round closes below its quorum; every included contribution was
accepted; no site counts twice; only the durable events matter; and when sites contribute and time
passes, the run goes on.

    pytest tests/coordinator/test_machine_stateful.py
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coordinator.admission import caught_up, check_member, directive
from coordinator.events import (
    Duplicate,
    Effect,
    Emit,
    Event,
    Heard,
    HoldChanged,
    Recovered,
    Reduce,
    Refuse,
    RoundClosed,
    RoundCommitted,
    ShardRefused,
    ShardStored,
    SiteEvicted,
    SiteJoined,
    SiteLeft,
    SiteReadmitted,
    Tick,
)
from coordinator.machine import step
from coordinator.state import Rules, State, initial_state

NAMES = st.sampled_from(["paris", "oslo", "kyoto"])
RULES = Rules(
    rounds=6,
    min_sites=2,
    grace_seconds=10.0,
    deadline_seconds=50.0,
    dead_after_seconds=30.0,
    inner_steps=15,
    quarantine_after=2,
    keep_updates=2,
)


class Rounds(RuleBasedStateMachine):
    """Drives `step` and follows its effects as the engine does."""

    @initialize(sites=st.sets(NAMES))
    def begin(self, sites: set[str]) -> None:
        self.now = 0.0
        self.state: State = initial_state(RULES, "theta0")
        self.journal: list[tuple[float, Event]] = []
        self.accepted: dict[tuple[int, str], int] = {}  # (round, site) -> incarnation, if whole
        self.included: list[tuple[int, str]] = []
        self.instances = 0
        self.reducing = False
        for site in sorted(sites):
            self.join(site, 1)
            self.ask(site, 0)

    # --- the engine in short --------------------------------------------------------------------

    def submit(self, event: Event) -> tuple[Effect, ...]:
        self.state, effects = step(self.state, event, self.now)
        if any(isinstance(effect, Refuse | Duplicate) for effect in effects):
            return effects
        if event.durable:
            self.journal.append((self.now, event))
        if isinstance(event, RoundClosed):
            self.check_closed(event)
        for effect in effects:
            if isinstance(effect, Emit):
                self.submit(effect.event)
            if isinstance(effect, Reduce):
                self.reducing = True
        return effects

    def check_closed(self, event: RoundClosed) -> None:
        assert len(event.included) >= RULES.min_sites
        assert len(set(event.included)) == len(event.included)
        whole = {site for round_, site in self.accepted if round_ == event.round}
        assert set(event.included) == whole, "what was accepted whole counts, and nothing else"
        self.included += [(event.round, site) for site in event.included]

    def push(self, site: str, shard: int, *, incarnation: int | None = None) -> None:
        known = self.state.sites[site]
        event = ShardStored(
            site=site,
            incarnation=known.incarnation if incarnation is None else incarnation,
            round=self.state.round,
            fragment=0,
            shard=shard,
            num_shards=known.num_shards,
            size_bytes=1,
            digest=f"{site}.{shard}.{self.state.round}",
            tokens=10,
            inner_steps=15,
            data_cursor=15,
        )
        effects, round_ = None, self.state.round
        before = self.state
        new, _ = step(before, event, self.now)
        if new is not before and site in new.complete:
            self.accepted[(round_, site)] = event.incarnation
        effects = self.submit(event)
        assert effects is not None

    # --- what may happen ------------------------------------------------------------------------

    @rule(site=NAMES, ranks=st.integers(1, 2))
    def join(self, site: str, ranks: int) -> None:
        self.instances += 1
        self.submit(SiteJoined(site=site, instance=str(self.instances), num_shards=ranks))

    @rule(site=NAMES, ranks=st.integers(1, 2))
    def arrive(self, site: str, ranks: int) -> None:
        """Join and hold theta of the current round, as most sites do."""
        self.join(site, ranks)
        self.ask(site, 0)

    @rule(site=NAMES, behind=st.integers(0, 3))
    def ask(self, site: str, behind: int) -> None:
        known = self.state.sites.get(site)
        if known is None or check_member(self.state, site, known.incarnation):
            return
        have = max(0, self.state.round - behind)
        theta = f"theta{have}"
        ready = caught_up(self.state, site, have, theta)
        if ready is not None:
            self.submit(ready)
        assert not isinstance(directive(self.state, site, have, theta), Refuse)

    @precondition(lambda self: self.state.expected)
    @rule(data=st.data())
    def contribute_whole(self, data: st.DataObject) -> None:
        site = data.draw(st.sampled_from(self.state.expected))
        for shard in range(self.state.sites[site].num_shards):
            self.push(site, shard)

    @precondition(lambda self: self.state.sites)
    @rule(data=st.data(), stale=st.booleans())
    def contribute(self, data: st.DataObject, stale: bool) -> None:
        site = data.draw(st.sampled_from(sorted(self.state.sites)))
        known = self.state.sites[site]
        shard = data.draw(st.integers(0, known.num_shards - 1))
        self.push(site, shard, incarnation=known.incarnation - stale)

    @precondition(lambda self: self.state.sites)
    @rule(
        data=st.data(), reason=st.sampled_from(["payload", "corrupt"]), cursor=st.integers(14, 16)
    )
    def malformed(self, data: st.DataObject, reason: str, cursor: int) -> None:
        site = data.draw(st.sampled_from(sorted(self.state.sites)))
        known = self.state.sites[site]
        event = ShardRefused(
            site=site,
            incarnation=known.incarnation,
            round=self.state.round,
            shard=data.draw(st.integers(0, known.num_shards - 1)),
            data_cursor=cursor,
            reason=reason,
        )
        self.submit(event)

    @precondition(lambda self: len(self.state.sites) > 2)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        site = data.draw(st.sampled_from(sorted(self.state.sites)))
        incarnation = self.state.sites[site].incarnation
        kinds = [Heard, Heard, SiteReadmitted, SiteReadmitted, SiteLeft, SiteEvicted]
        kind = data.draw(st.sampled_from(kinds))
        if kind is SiteLeft:
            self.submit(SiteLeft(site=site, incarnation=incarnation, reason=""))
        elif kind is Heard:
            before = self.state
            self.submit(Heard(site=site, incarnation=incarnation))
            assert self.state.sites[site].status != "lost", "it is there again"
            if site in before.lost:
                assert site in self.state.expected, "and its round waits for it again"
        elif kind is SiteEvicted:
            self.submit(SiteEvicted(site=site))
        else:
            before = self.state
            self.submit(SiteReadmitted(site=site))
            out = before.sites[site].status in ("evicted", "quarantined")
            assert out or self.state is before, "who is in the run stays in it"

    @precondition(lambda self: self.state.round > 0)
    @rule(hold=st.sampled_from(["none", "none", "none", "paused", "draining"]))
    def hold(self, hold: str) -> None:
        self.submit(HoldChanged(hold=hold))  # type: ignore[arg-type]

    @rule(seconds=st.sampled_from([1.0, 11.0, 11.0, 31.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.submit(Tick())

    @precondition(lambda self: self.reducing)
    @rule()
    def commit(self) -> None:
        self.reduce()

    def reduce(self) -> None:
        self.reducing = False
        round_ = self.state.round
        self.submit(
            RoundCommitted(
                round=round_,
                update_bytes=1,
                update_digest=f"update{round_}",
                theta_digest=f"theta{round_ + 1}",
            )
        )

    @precondition(lambda self: self.state.phase != "gathering")
    @rule()
    def crash(self) -> None:
        """All that is volatile is lost; the journal is replayed on a new clock."""
        self.now = 0.0
        state = initial_state(RULES, "theta0")
        for at, event in self.journal:
            state, _ = step(state, event, at)
        self.state, self.reducing = state, False
        self.submit(Recovered())

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def whole_contributions_of_the_open_round_are_kept(self) -> None:
        for (round_, site), incarnation in self.accepted.items():
            if round_ == self.state.round and self.state.phase in ("open", "closing"):
                assert self.state.contributions[site].incarnation == incarnation

    @invariant()
    def no_site_counts_twice(self) -> None:
        assert len(set(self.included)) == len(self.included)

    @invariant()
    def whoever_is_lost_is_not_waited_for(self) -> None:
        waited_for = set(self.state.expected) - set(self.state.complete)
        assert not waited_for & {n for n, site in self.state.sites.items() if not site.alive}
        assert not waited_for & set(self.state.lost)

    @invariant()
    def the_reducer_is_at_work_while_a_round_is_closing(self) -> None:
        assert self.reducing == (self.state.phase == "closing")

    def teardown(self) -> None:
        """Whatever has happened: two fresh sites that contribute bring the run to its end."""
        if not hasattr(self, "state"):
            return
        if self.reducing:
            self.reduce()
        self.submit(HoldChanged(hold="none"))
        for site in ("quito", "accra"):
            self.join(site, 1)
        for _ in range(RULES.rounds - self.state.round):
            round_ = self.state.round
            for site in ("quito", "accra"):
                self.ask(site, 0)
            for site in ("quito", "accra"):
                self.push(site, 0)
            for _ in range(6):  # the others are lost or the grace ends: every wait ends
                self.tick(11.0)
                for site in ("quito", "accra"):
                    self.submit(Heard(site=site, incarnation=self.state.sites[site].incarnation))
            if self.reducing:
                self.reduce()
            assert self.state.round == round_ + 1
        assert self.state.phase == "finished"


def test_any_events_in_any_order() -> None:
    run_state_machine_as_test(
        Rounds,
        settings=settings(
            max_examples=150,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
