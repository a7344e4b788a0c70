"""SIGKILL of the coordinator at every named write point, and a restart: as if nothing had been.

Compared with: the theta of every round of a run that nobody disturbed. Run alone:
pytest tests/integration/test_crash.py
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from chaos.numpy_site import NumpySite, SiteThread
from chaos.processes import Coordinator, until
from support.runs import LAYOUT, config_of, create_store

from coordinator.check import check_state
from coordinator.events import RoundClosed, RoundCommitted, ShardStored
from coordinator.failpoints import NAMES
from loco.errors import EXIT_FAILED

SITES = {"paris": 2, "oslo": 1}
RAW: dict[str, dict[str, Any]] = {
    "run": {"rounds": 6},
    "outer": {"fragments": 2},
    "codec": {"k_sites": 1},
    "quorum": {"min_sites": 2, "grace_seconds": 600.0, "dead_after_seconds": 600.0},
    "state": {"snapshot_every_rounds": 2, "keep_updates": 2},
}


class Run:
    """A coordinator process and two sites in threads, from the first round to the last."""

    def __init__(self, directory: Path) -> None:
        self.coordinator = Coordinator(directory, RAW)
        create_store(self.coordinator.state, config_of(**RAW)).close()

    def finish(self, *fail_points: str) -> list[NumpySite]:
        """Go through all rounds; die at each fail point in turn, and start again."""
        self.coordinator.start(fail_points[0] if fail_points else "")
        address = f"127.0.0.1:{self.coordinator.port}"
        threads = [
            SiteThread(NumpySite(address, name, LAYOUT, ranks=ranks))
            for name, ranks in SITES.items()
        ]
        for following in [*fail_points[1:], ""][: len(fail_points)]:
            assert self.coordinator.wait() == -signal.SIGKILL, self.coordinator.tail()
            self.coordinator.start(following)
        sites = [thread.join() for thread in threads]
        self.coordinator.stop()
        return sites

    def digests(self) -> dict[int, str]:
        """Digest of theta after each round."""
        return {
            event.round: event.theta_digest
            for event in self.coordinator.events()
            if isinstance(event, RoundCommitted)
        }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("undisturbed"))
    run.finish()
    return run


@pytest.mark.parametrize("name", NAMES)
def test_killed_at_a_write_point_the_run_ends_as_if_undisturbed(
    name: str, tmp_path: Path, undisturbed: Run
) -> None:
    run = Run(tmp_path)
    sites = run.finish(f"{name}:2")
    assert_as_if_undisturbed(run, sites, undisturbed)


@pytest.mark.slow
def test_killed_again_and_again_the_run_ends_as_if_undisturbed(
    tmp_path: Path, undisturbed: Run
) -> None:
    """Also while it recovers: a life may be over in the replay of what the one before did."""
    points = ["reduce.cell_written:1", "reduce.before_update:1", "journal.after_append:3"]
    run = Run(tmp_path)
    sites = run.finish("reduce.update_renamed:5", *points, "upload.renamed:1")
    assert_as_if_undisturbed(run, sites, undisturbed)


def assert_as_if_undisturbed(run: Run, sites: list[NumpySite], undisturbed: Run) -> None:
    expected = undisturbed.digests()
    assert len(expected) == 6
    assert run.digests() == expected
    for site in sites:
        assert {r: fate.theta_digest for r, fate in site.fates.items()} == expected
        assert all(fate.included for fate in site.fates.values())
    assert_each_contribution_counts_once(run)
    verdict = check_state(run.coordinator.state)
    assert verdict.faults == []
    assert verdict.theta_digest == expected[5]
    assert list(run.coordinator.state.rglob("*.partial")) == []


def assert_each_contribution_counts_once(run: Run) -> None:
    events = run.coordinator.events()
    stored = [(e.site, e.round, e.shard) for e in events if isinstance(e, ShardStored)]
    assert len(stored) == len(set(stored)) == 6 * sum(SITES.values())
    closed = [e for e in events if isinstance(e, RoundClosed)]
    assert [e.included for e in closed] == [("oslo", "paris")] * 6


def test_killed_while_the_run_is_created_it_starts_anew(tmp_path: Path) -> None:
    """The first snapshot is written before the journal: without one there is no run yet.

    What dies is the process that makes the parameters; the coordinator says so and ends.
    """
    run = Run(tmp_path)
    for path in run.coordinator.state.glob("journal.sqlite*"):
        path.unlink()
    coordinator = run.coordinator
    coordinator.spawn(coordinator.command(), LOCO_FAIL_POINT="snapshot.buffer_written:1")
    assert coordinator.wait() == EXIT_FAILED
    coordinator.start()
    until(lambda: coordinator.round() == 0, "the new run is served")
    coordinator.stop()
