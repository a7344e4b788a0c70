"""Chaos: a run of real processes, one fault after the other, and what became of it.

    python -m tests.chaos --faults 200 --seed 1 --json
    python -m tests.chaos --runs torchft --faults 18 --json      ranks of a site that die

Three runs share the faults. In the exact one every site is in every round, so it must equal, bit
for bit, a run that nobody disturbed, which is made after it. In the quorum one rounds close without
sites that are away; every contribution must still be accounted for, and theta be the same
everywhere. In the torchft one the ranks of a site come and go; the coordinator must not notice, and
all ranks must have the same parameters after each step. Exit code 0 when nothing was lost and
everything that must be equal is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.check import check_state
from coordinator.events import Event, RoundClosed, ShardStored

from . import steps
from .elastic import ElasticSite
from .kinds import KINDS, SHARES, plan, split
from .processes import Raw, SiteProcess, Sites, World
from .runs import exact_run, quorum_run, torchft_run
from .verdict import (
    Account,
    account,
    counted_twice,
    digests_of,
    first_difference,
    read_log,
    wrong_digests,
)

DISK_MEGABYTES = 128
SITES: dict[str, Sites] = {
    "exact": {"paris": (SiteProcess, 2), "oslo": (SiteProcess, 1)},
    "quorum": {"paris": (SiteProcess, 2), "oslo": (SiteProcess, 1), "kyoto": (SiteProcess, 1)},
    "torchft": {"paris": (ElasticSite, 3), "oslo": (SiteProcess, 1)},
}
CONFIGS: dict[str, Callable[[int], Raw]] = {
    "exact": exact_run,
    "quorum": quorum_run,
    "torchft": torchft_run,
}


@dataclass
class Outcome:
    """Of one disturbed run."""

    kinds: Counter[str] = field(default_factory=Counter)
    recovery_seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    account: Account | None = None
    compared: int = 0
    steps_compared: int = 0
    """Inner steps of ranks under torchft whose parameters were compared with the others'."""
    measured: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of what has a bound, by what it was."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=40, help="how many, over all runs")
    parser.add_argument("--runs", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--seed", type=int, default=0, help="chooses faults and their moments")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--keep", type=Path, help="directory for logs and state; must not exist")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        directory = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="loco-chaos-"))
        )
        result = chaos(options.runs, options.faults, options.seed, directory)
    print(json.dumps(result) if options.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    sys.exit(0 if result["ok"] else 1)


def chaos(runs: list[str], faults: int, seed: int, directory: Path) -> dict[str, Any]:
    """Disturb these runs, make the undisturbed one; the result as JSON will show it."""
    began, rng = time.monotonic(), random.Random(seed)
    outcomes = {
        run: disturb(directory / run, CONFIGS[run](seed), SITES[run], plan(count, rng, run), rng)
        for run, count in split(faults, runs).items()
    }
    undisturbed: dict[int, str] = {}
    if "exact" in outcomes:
        rounds = len(outcomes["exact"].digests)
        undisturbed = run_undisturbed(directory / "undisturbed", seed, rounds)
    return summary(outcomes, undisturbed, time.monotonic() - began)


def disturb(
    directory: Path, raw: Raw, sites: Sites, kinds: list[str], rng: random.Random
) -> Outcome:
    """One run, with one fault after the other; then its books."""
    outcome = Outcome()
    disk = small_disk(directory / "disk") if "disk full" in kinds else contextlib.nullcontext()
    with disk, World(directory, raw, sites) as world:
        try:
            world.start()
            for kind in kinds:
                say(f"{directory.name}: fault {outcome.kinds.total() + 1} of {len(kinds)}, {kind}")
                time.sleep(rng.uniform(0.0, 0.5))
                repaired = KINDS[kind](world, rng)
                world.progress()
                outcome.kinds[kind] += 1
                outcome.recovery_seconds.append(time.monotonic() - repaired)
            codes = world.drain()
            outcome.failures += [
                f"{name} ended with {code}" for name, code in codes.items() if code
            ]
        except Exception as error:  # reported with the rest, and as a failure
            say(f"{directory.name}: {type(error).__name__}: {error}")
            outcome.failures.append(f"{directory.name}: {type(error).__name__}: {error}")
            world.coordinator.kill()
        settle_books(world, outcome)
    return outcome


def settle_books(world: World, outcome: Outcome) -> None:
    events = world.coordinator.events()
    told = {
        name: read_log(line["message"] for line in site.lines())
        for name, site in world.sites.items()
    }
    outcome.digests = digests_of(events)
    outcome.account = account(events, told)
    outcome.compared, wrong = wrong_digests(events, told)
    outcome.failures += [f"theta differs: {where}" for where in wrong]
    outcome.failures += [f"lost: {where}" for where in outcome.account.lost]
    outcome.failures += counted_twice(events)
    outcome.failures += check_state(world.coordinator.state).faults
    for site in world.sites.values():
        if isinstance(site, ElasticSite):
            settle_ranks(site, events, outcome)


def settle_ranks(site: ElasticSite, events: list[Event], outcome: Outcome) -> None:
    """The parameters of all ranks after each step; and the coordinator has noticed nothing."""
    told = site.steps()
    outcome.steps_compared += len(told)
    outcome.measured |= site.measured
    outcome.failures += site.late + steps.disagreements(told)
    closed = [event for event in events if isinstance(event, RoundClosed)]
    outcome.failures += [
        f"round {event.round} closed without {site.name}"
        for event in closed
        if site.name not in event.included
    ]
    lives = {e.incarnation for e in events if isinstance(e, ShardStored) and e.site == site.name}
    if lives != {1}:
        outcome.failures.append(f"{site.name} joined again: incarnations {sorted(lives)}")


def run_undisturbed(directory: Path, seed: int, rounds: int) -> dict[int, str]:
    """Digests of so many rounds of the exact run, without faults."""
    say(f"undisturbed: {rounds} rounds")
    with World(directory, exact_run(seed), SITES["exact"]) as world:
        world.start()
        for round_ in (*range(10, rounds, 10), rounds):  # each with a patience of its own
            world.reach(round_)
        world.drain()
        return {r: d for r, d in digests_of(world.coordinator.events()).items() if r < rounds}


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """A file system of its own, to be filled; needs root."""
    directory.mkdir(parents=True)
    size = f"size={DISK_MEGABYTES}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "loco-chaos", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def summary(
    outcomes: dict[str, Outcome], undisturbed: dict[int, str], seconds: float
) -> dict[str, Any]:
    """The JSON object of the command line."""
    runs = outcomes.values()
    accounts = [outcome.account for outcome in runs if outcome.account is not None]
    recovery = [seconds for outcome in runs for seconds in outcome.recovery_seconds]
    failures = [failure for outcome in runs for failure in outcome.failures]
    kinds = sum((outcome.kinds for outcome in runs), Counter[str]())
    disturbed = outcomes["exact"].digests if "exact" in outcomes else {}
    difference = first_difference(disturbed, undisturbed)
    return {
        "faults": kinds.total(),
        "kinds": dict(sorted(kinds.items())),
        "rounds": sum(a.rounds for a in accounts),
        "accepted": sum(a.accepted for a in accounts),
        "included": sum(a.included for a in accounts),
        "kept_in_error_feedback": sum(a.kept for a in accounts),
        "lost": sum(len(a.lost) for a in accounts),
        "digests_equal": not any(failure.startswith("theta differs") for failure in failures),
        "digests_compared": sum(outcome.compared for outcome in runs),
        "bit_equal_to_uninterrupted": (
            difference is None and len(undisturbed) == len(disturbed) > 0
            if "exact" in outcomes
            else None
        ),
        "rounds_compared": len(undisturbed),
        "first_difference": difference,
        "rank_steps_equal": not any(f.startswith("parameters differ") for f in failures),
        "rank_steps_compared": sum(outcome.steps_compared for outcome in runs),
        "recovery_seconds": spread(recovery),
        "measured_seconds": {
            what: spread(values)
            for outcome in runs
            for what, values in sorted(outcome.measured.items())
        },
        "seconds": round(seconds),
        "failures": failures,
        "ok": not failures and difference is None,
    }


def spread(seconds: list[float]) -> dict[str, float | int | None]:
    """Of some measurements."""
    return {
        "count": len(seconds),
        "median": round(statistics.median(seconds), 2) if seconds else None,
        "max": round(max(seconds), 2) if seconds else None,
    }


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
