"""The shell around the round machine: journals its events, carries out its effects, keeps time.

One asyncio task at a time steps the machine, with all the events that came while the one before it
was journaled: they cost one sync together. SQLite and the reducer run in threads. Whoever waits for
the run to move on waits in `changed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from coordinator.chain import Chain
from coordinator.events import (
    Duplicate,
    Effect,
    Emit,
    Event,
    Heard,
    Recovered,
    Reduce,
    Refuse,
    RoundClosed,
    RoundCommitted,
    Say,
    SettingChanged,
    ShardStored,
    SnapshotRequested,
    Tick,
)
from coordinator.files import is_disk_full
from coordinator.keys import Keys
from coordinator.machine import step
from coordinator.recovery import recover
from coordinator.reducer import Reduced, Reducer
from coordinator.refused import RefusedRequest
from coordinator.snapshots import KEEP as KEEP_SNAPSHOTS
from coordinator.state import State
from coordinator.store import Store
from loco import codec

T = TypeVar("T")
Answer: TypeAlias = Refuse | Duplicate | None
TICK_SECONDS = 0.5
RETRY_SECONDS = 2.0
COMPILE_ELEMENTS = 10_000_000  # below it, Numba's 110 MB are more than the seconds that it saves
DISK_FULL = "the coordinator's disk is full: nothing is lost, it goes on when there is room"

log = logging.getLogger("loco.coordinator")
# They change what no waiting site may do: to wake all of them for each would be quadratic in sites.
_QUIET = (ShardStored, RoundClosed, SettingChanged, SnapshotRequested)
SIGN_SECONDS = 1.0  # signs of life that come faster are not worth a step


@dataclass
class _Asked:
    """An event that waits for its step, and the answer to whoever submitted it."""

    event: Event
    answer: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(frozen=True)
class _Taken:
    """A step that the machine accepts; it counts once its event is in the journal."""

    event: Event
    state: State
    effects: tuple[Effect, ...]


class Engine:
    """Owns the state of the run. `observe` is called after every change, for metrics and log."""

    def __init__(
        self,
        store: Store,
        observe: Callable[[Event | Say, State], None],
        keys: Keys | None = None,
    ) -> None:
        """`keys` sign the run's history."""
        self.store = store
        self.chain = Chain(
            store.directory,
            store.run_id,
            keys,
            remembered=2 * store.config.state.keep_updates + 4 * KEEP_SNAPSHOTS,
        )
        self.state, reducer = recover(store)
        self._fell_back = store.tidy(reducer.snapshot_round)
        self._reducer: Reducer | None = reducer
        self.draining = False
        self._snapshot_asked = False
        self._observe = observe
        self._turn = asyncio.Lock()
        self._reducing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: list[_Asked] = []
        self._steps: set[asyncio.Task[Answer]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reducer")

    async def start(self) -> None:
        """Begin to keep time and take up what a crash interrupted."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._until_room(self._enter_snapshot)  # also a new run's, of round 0
        if self._fell_back:  # updates may not reach back to the snapshot before: joiners need one
            await self._save_snapshot()
        await self.submit(Recovered())
        self._spawn(self._tick_for_ever())
        if self.store.layout.num_elements >= COMPILE_ELEMENTS:
            codec.warm_up_beside(self.store.layout.num_elements)

    def drain(self) -> None:
        """Send everyone who waits away; what is in progress may finish."""
        self.draining = True
        self._wake()

    async def stop(self) -> None:
        """After the last request: finish the reduction in progress, close the journal."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._turn:  # a step whose caller was cancelled
            await asyncio.to_thread(self._thread.shutdown)
            self.store.close()

    async def submit(self, event: Event) -> Answer:
        """Step the machine; None when the event was accepted and, if durable, journaled.

        A caller that is cancelled (its client went away) does not interrupt the step: else the
        journal would hold an event that the state does not.
        """
        asked = _Asked(event)
        self._asked.append(asked)
        step_in_turn = asyncio.create_task(self._in_turn(asked))
        self._steps.add(step_in_turn)
        step_in_turn.add_done_callback(self._steps.discard)
        return await asyncio.shield(step_in_turn)

    async def heard(self, site: str, incarnation: int) -> None:
        """Traffic is a sign of life: a site in the middle of a long transfer is alive."""
        known = self.state.sites.get(site)
        if known is not None and time.monotonic() - known.heard_at >= SIGN_SECONDS:
            await self.submit(Heard(site=site, incarnation=incarnation))

    async def changed(self, timeout: float) -> None:
        """Return when the state has changed, or after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    # --- stepping -------------------------------------------------------------------------------

    async def _in_turn(self, asked: _Asked) -> Answer:
        async with self._turn:
            if not asked.answer.done():  # else it was stepped with one that came before
                await self._step_all_asked()
        return asked.answer.result()

    async def _step_all_asked(self) -> None:
        together, self._asked = self._asked, []
        try:
            await self._step(together)
        except Exception as error:
            # The journal may hold what the state does not: stop, and let replay decide.
            self._fail(error)
            for asked in together:
                if not asked.answer.done():
                    failed = RefusedRequest("", "the coordinator has failed; it must be restarted")
                    failed.__cause__ = error
                    asked.answer.set_exception(failed)

    async def _step(self, together: list[_Asked]) -> None:
        """Step the events one after the other, journal all, and only then answer and show them.

        Where the disk is full no durable event has happened, nor what the machine decides after
        one that is not: it decides the same at a later tick.
        """
        steps, answers = self._foresee(together)
        durable = [taken.event for taken in steps if taken.event.durable]
        full = await self._append(durable) if durable else None
        if full is not None:
            passing = [asked for asked in together if not asked.event.durable]
            steps, rest = self._foresee(passing, decide=False)
            theirs = iter(rest)
            answers = [full if asked.event.durable else next(theirs) for asked in together]
        for taken in steps:
            self._show(taken)
        for asked, answer in zip(together, answers, strict=True):
            asked.answer.set_result(answer)

    def _foresee(
        self, together: list[_Asked], *, decide: bool = True
    ) -> tuple[list[_Taken], list[Answer]]:
        """The steps that these events come to, and the answer to each of them.

        With what the machine decides after them, unless not to `decide`.
        """
        state, now = self.state, time.monotonic()
        steps: list[_Taken] = []
        answers: list[Answer] = []
        for asked in together:
            answers.append(None)
            events = [asked.event]
            while events:
                event = events.pop(0)
                new, effects = step(state, event, now)
                refusal = next((e for e in effects if isinstance(e, Refuse | Duplicate)), None)
                if refusal is not None:
                    if event is asked.event:  # what the machine decided itself is not asked for
                        answers[-1] = refusal
                    continue
                state = new
                steps.append(_Taken(event, state, effects))
                events += [e.event for e in effects if isinstance(e, Emit) and decide]
        return steps, answers

    async def _append(self, events: list[Event]) -> Refuse | None:
        """Journal the events, or refuse them where the disk is full: then they did not happen."""
        try:
            await asyncio.to_thread(self.store.journal.append, events, time.time())
        except sqlite3.OperationalError as error:
            if not is_disk_full(error):
                raise
            kinds = ", ".join(sorted({type(event).__name__ for event in events}))
            log.error("the journal cannot grow, %s waits: %s", kinds, error)
            return Refuse(reason="disk_full", message=DISK_FULL)
        return None

    def _show(self, taken: _Taken) -> None:
        """Make a journaled step the state of the run."""
        if isinstance(taken.event, RoundCommitted):
            self._snapshot_asked = self.state.snapshot_due  # up to now, the commit clears it
        self.state = taken.state
        self._observe(taken.event, taken.state)
        if taken.event.durable and not isinstance(taken.event, _QUIET):
            self._wake()
        for effect in taken.effects:
            if isinstance(effect, Reduce):
                self._spawn(self._reduce())
            elif isinstance(effect, Say):
                self._observe(effect, self.state)
        if isinstance(taken.event, SnapshotRequested) and not taken.state.snapshot_due:
            self._spawn(self.snapshot_after(taken.state.round - 1))

    # --- reducing -------------------------------------------------------------------------------

    async def _reduce(self) -> None:
        async with self._reducing:  # also the next round's reduction waits until this one is tidy
            state = self.state
            made = await self._until_room(self._reduce_or_recover, state)
            path = self.store.update(state.round)
            await self._until_room(self.chain.add, "update", state.round, path, made.theta_digest)
            event = RoundCommitted(
                round=state.round,
                update_bytes=made.update_bytes,
                update_digest=made.update_digest,
                theta_digest=made.theta_digest,
            )
            while await self.submit(event) is not None:
                await asyncio.sleep(RETRY_SECONDS)
            if self._snapshot_is_due(state):
                await self._save_snapshot()
            await self._until_room(self.store.forget_before, state.round + 1)

    def _snapshot_is_due(self, closed: State) -> bool:
        """By its age, so that one which a crash prevented is made up for."""
        assert self._reducer is not None
        round_ = closed.round + 1
        old = round_ - self._reducer.snapshot_round >= self.store.config.state.snapshot_every_rounds
        return old or self._snapshot_asked or round_ == self.store.config.run.rounds

    async def snapshot_after(self, round_: int) -> None:
        """Write one of theta as it is now, unless there is one that is newer than that round."""
        async with self._reducing:
            assert self._reducer is not None
            if self._reducer.snapshot_round <= round_:
                await self._save_snapshot()

    async def _save_snapshot(self) -> None:
        """Between two reductions: the buffers are those of the state's round."""
        assert self._reducer is not None
        async with self._turn:
            state, journal_seq = self.state, self.store.journal.last_seq()
        await self._until_room(self._save_and_enter, state, journal_seq)

    def _save_and_enter(self, state: State, journal_seq: int) -> None:
        assert self._reducer is not None
        self._reducer.save_snapshot(state, journal_seq)
        self._enter_snapshot()

    def _enter_snapshot(self) -> None:
        newest = self.store.snapshots.newest()
        if self.chain.get("snapshot", newest.round) is not None:
            return  # hashing a large theta again would delay every start
        self.chain.add("snapshot", newest.round, newest.theta, newest.manifest.theta_digest)

    def _reduce_or_recover(self, state: State) -> Reduced:
        reducer, self._reducer = self._reducer, None
        if reducer is None:  # the last attempt left its buffers between two rounds
            _, reducer = recover(self.store)
        made = reducer.reduce(state)
        self._reducer = reducer
        return made

    async def _until_room(self, work: Callable[..., T], *args: object) -> T:
        """Do `work` in the reducer's thread; while the disk is full, say so and try again."""
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
            except (OSError, sqlite3.OperationalError) as error:
                if not is_disk_full(error):
                    raise
                log.error("%s; trying again in %.0f s", DISK_FULL, RETRY_SECONDS)
            await asyncio.sleep(RETRY_SECONDS)

    # --- time and tasks -------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self.submit(Tick())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
