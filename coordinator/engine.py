"""The shell around the round machine: journals its events, carries out its effects, keeps time.

One asyncio task at a time steps the machine; SQLite and the reducer run in threads. Whoever waits
for the run to move on waits in `changed`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
TICK_SECONDS = 0.5
RETRY_SECONDS = 2.0
DISK_FULL = "the coordinator's disk is full: nothing is lost, it goes on when there is room"

log = logging.getLogger("loco.coordinator")
# They change what no waiting site may do: to wake all of them for each would be quadratic in sites.
_QUIET = (ShardStored, RoundClosed, SettingChanged, SnapshotRequested)
SIGN_SECONDS = 1.0  # signs of life that come faster are not worth a step


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
        self._observe = observe
        self._turn = asyncio.Lock()
        self._reducing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps: set[asyncio.Task[Refuse | Duplicate | None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reducer")

    async def start(self) -> None:
        """Begin to keep time and take up what a crash interrupted."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._until_room(self._enter_snapshot)  # also a new run's, of round 0
        if self._fell_back:  # updates may not reach back to the snapshot before: joiners need one
            await self._save_snapshot()
        await self.submit(Recovered())
        self._spawn(self._tick_for_ever())
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

    async def submit(self, event: Event) -> Refuse | Duplicate | None:
        """Step the machine; None when the event was accepted and, if durable, journaled.

        A caller that is cancelled (its client went away) does not interrupt the step: else the
        journal would hold an event that the state does not.
        """
        step_in_turn = asyncio.create_task(self._submit(event))
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
        event = self._changed
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except TimeoutError:
            return

    # --- stepping -------------------------------------------------------------------------------

    async def _submit(self, event: Event) -> Refuse | Duplicate | None:
        async with self._turn:
            try:
                return await self._step(event)
            except Exception as error:
                # The journal may hold what the state does not: stop, and let replay decide.
                self._fail(error)
                raise RefusedRequest(
                    "", "the coordinator has failed; it must be restarted"
                ) from error

    async def _step(self, event: Event) -> Refuse | Duplicate | None:
        new, effects = step(self.state, event, time.monotonic())
        for effect in effects:
            if isinstance(effect, Refuse | Duplicate):
                return effect
        if event.durable:
            full = await self._append(event)
            if full is not None:
                return full
        self.state = new
        self._observe(event, new)
        if event.durable and not isinstance(event, _QUIET):
            self._wake()
        for effect in effects:
            await self._carry_out(effect)
        return None

    async def _append(self, event: Event) -> Refuse | None:
        """Journal the event, or refuse it where the disk is full: then it has not happened."""
        try:
            await asyncio.to_thread(self.store.journal.append, event, time.time())
        except sqlite3.OperationalError as error:
            if not is_disk_full(error):
                raise
            log.error("the journal cannot grow, %s waits: %s", type(event).__name__, error)
            return Refuse(reason="disk_full", message=DISK_FULL)
        return None

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Emit(event=event):
                # Refused only where the disk is full; the machine decides the same at a later tick.
                await self._step(event)
            case Reduce():
                self._spawn(self._reduce())
            case Say():
                self._observe(effect, self.state)
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

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
        return old or closed.snapshot_due or round_ == self.store.config.run.rounds

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
            except OSError as error:
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
