"""A full disk: refused with the reason, nothing lost, and on again when there is room.

The coordinator's disk, and that of a site's checkpoints. Compared with: theta of the same run on a
disk with room. Needs root, for a small file system of its
own. Run alone: pytest tests/integration/test_disk_full.py
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from chaos.lives import Killed, Life
from chaos.numpy_site import NumpySite, SiteThread
from support.cluster import run_loco
from support.live import Coordinator, coordinating, eventually
from support.one_site import config_of_run, run_of
from support.runs import config_of, create_store

from coordinator.check import check_state
from coordinator.events import RoundCommitted
from coordinator.files import write_aside
from coordinator.store import Store
from loco.layout import Layout

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system"),
]

LAYOUT = Layout.of([("weight", (64, 1024))])
CONFIG = config_of(
    codec={"bits": 32},
    outer={"aggregation": "mean"},
    quorum={"min_sites": 1},
    run={"rounds": 6},
    state={"snapshot_every_rounds": 2, "keep_updates": 2},
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "loco-test", directory], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True)


@contextlib.contextmanager
def full(disk: Path, leave_bytes: int = 0) -> Iterator[None]:
    """No more than `leave_bytes` of room while the block runs."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    os.truncate(filler, max(0, filler.stat().st_size - leave_bytes))
    try:
        yield
    finally:
        filler.unlink()


def digests(coordinator: Coordinator) -> list[str]:
    events = (event for _, event in coordinator.store.journal.replay(after=0))
    return [event.theta_digest for event in events if isinstance(event, RoundCommitted)]


@pytest.fixture(scope="module")
def with_room(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    store = create_store(tmp_path_factory.mktemp("room"), CONFIG, layout=LAYOUT)
    with coordinating(store) as coordinator:
        SiteThread(NumpySite(coordinator.address, "paris", LAYOUT)).join()
        return digests(coordinator)


# 0: no block can be written. 400 kB: the contribution (256 KiB) fits, the update after it does not.
@pytest.mark.parametrize("leave_bytes", [0, 400_000])
def test_the_run_waits_for_room_and_ends_as_with_room(
    leave_bytes: int, disk: Path, with_room: list[str]
) -> None:
    store = create_store(disk / "state", CONFIG, layout=LAYOUT)
    with coordinating(store) as coordinator:
        site = NumpySite(coordinator.address, "paris", LAYOUT)
        with full(disk, leave_bytes):
            running = SiteThread(site)
            if leave_bytes == 0:
                refused = {"reason": "disk_full"}
                eventually(
                    lambda: coordinator.metric("loco_rejections_total", **refused) > 1, "refused"
                )
            else:
                eventually(lambda: coordinator.state.phase == "closing", "the round is closed")
            assert coordinator.state.round == 0
            assert running.running
        assert all(fate.included for fate in running.join().fates.values())
        assert digests(coordinator) == with_room
    assert check_state(disk / "state").faults == []
    assert list((disk / "state").rglob("*.partial")) == []


def test_a_coordinator_does_not_start_on_a_full_disk_and_says_so(
    disk: Path, tmp_path: Path, with_room: list[str]
) -> None:
    """One line, exit code 1; with room again the run goes on as if nothing had been."""
    state, config = disk / "state", tmp_path / "run.toml"
    create_store(state, CONFIG, layout=LAYOUT).close()
    config.write_text(tomli_w.dumps(CONFIG.model_dump(mode="json", exclude_none=True)))
    start = ("coordinator", str(config), "--state", str(state), "--listen", "127.0.0.1:0")
    with full(disk):
        for command in (start, ("state", "check", str(state))):
            refused = run_loco(*command)
            assert refused.returncode == 1, refused
            line = refused.stderr.strip().splitlines()[-1]
            assert f"the disk of {state} is full" in line
            assert "make room and start again" in line
    assert check_state(state).faults == []
    with coordinating(Store.open(state)) as coordinator:
        SiteThread(NumpySite(coordinator.address, "paris", LAYOUT)).join()
        assert digests(coordinator) == with_room


def test_what_did_not_fit_leaves_nothing_behind(disk: Path) -> None:
    with full(disk, leave_bytes=8192):
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                write_too_much(disk / "file")
        assert [path.name for path in disk.iterdir()] == ["filler"]


def write_too_much(path: Path) -> None:
    """Some of it fits, and some is still in the buffer when the file is given up."""
    with write_aside(path) as file:
        file.write(bytes(5000))
        file.write(bytes(100_000))


def test_a_site_goes_on_while_its_checkpoints_disk_is_full(disk: Path, tmp_path: Path) -> None:
    """It fills up in round 2, the site dies in round 5 and comes back from round 2."""
    with run_of(tmp_path / "alone", config_of_run()) as coordinator:
        Life(coordinator.address, "paris").finishes()
        wanted = digests(coordinator)
    with run_of(tmp_path, config_of_run()) as coordinator, contextlib.ExitStack() as filled:

        def fill_up_and_die(what: str, round_: int) -> bool:
            if (what, round_) == ("before push", 2):
                filled.enter_context(full(disk))
            return (what, round_) == ("before push", 5)

        first = Life(
            coordinator.address, "paris", checkpoint=disk / "site", is_over=fill_up_and_die
        )
        assert isinstance(first.ends(), Killed)
        left = ["round-00000001", "round-00000002"]
        assert sorted(path.name for path in (disk / "site").iterdir()) == left
        Life(coordinator.address, "paris", checkpoint=disk / "site").finishes()
        assert digests(coordinator) == wanted
        assert sorted(path.name for path in (disk / "site").iterdir()) == left
        failed = "loco_failed_checkpoints_total"
        eventually(lambda: coordinator.metric(failed, site="paris") >= 5, "it is counted")
