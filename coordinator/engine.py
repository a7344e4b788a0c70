"""The shell around the round machine: journals its events, carries out its effects, keeps time.

One asyncio task at a time steps the machine; SQLite and the reducer run in threads. Whoever waits
for the run to move on waits in `changed`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from coordinator.events import (
    Duplicate,
    Effect,
    Emit,
    Event,
    Heard,
    Recovered,
    Reduce,
    Refuse,
    RoundCommitted,
    Say,
    Tick,
)
from coordinator.machine import step
from coordinator.recovery import recover
from coordinator.state import State
from coordinator.store import Store

T = TypeVar("T")
TICK_SECONDS = 0.5
SIGN_SECONDS = 1.0  # signs of life that come faster are not worth a step


class Engine:
    """Owns the state of the run. `observe` is called after every change, for metrics and log."""

    def __init__(self, store: Store, observe: Callable[[Event | Say, State], None]) -> None:
        self.store = store
        self.state, self._reducer = recover(store)
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
        await self.submit(Recovered())
        self._spawn(self._tick_for_ever())

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
            return await self._step(event)

    async def _step(self, event: Event) -> Refuse | Duplicate | None:
        new, effects = step(self.state, event, time.monotonic())
        for effect in effects:
            if isinstance(effect, Refuse | Duplicate):
                return effect
        if event.durable:
            await asyncio.to_thread(self.store.journal.append, event, time.time())
        self.state = new
        self._observe(event, new)
        if event.durable:
            self._wake()
        for effect in effects:
            await self._carry_out(effect)
        return None

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Emit(event=event):
                await self._step(event)
            case Reduce():
                self._spawn(self._reduce())
            case Say():
                self._observe(effect, self.state)
            case _:
                raise AssertionError(f"unknown effect {effect!r}")

    async def _reduce(self) -> None:
        async with self._reducing:  # also the next round's reduction waits until this one is tidy
            state = self.state
            included = {name: state.contributions[name] for name in state.included}
            made = await self._in_thread(self._reducer.reduce, state.round, included)
            await self.submit(
                RoundCommitted(
                    round=state.round,
                    update_bytes=made.update_bytes,
                    update_digest=made.update_digest,
                    theta_digest=made.theta_digest,
                )
            )
            await self._in_thread(self._tidy, state.round + 1)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _tidy(self, round_: int) -> None:
        """After a commit: a snapshot when one is due, and old updates go."""
        config = self.store.config
        if round_ % config.state.snapshot_every_rounds == 0 or round_ == config.run.rounds:
            self._reducer.save_snapshot(round_)
        self.store.forget_updates_before(round_ - config.state.keep_updates)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self.submit(Tick())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
