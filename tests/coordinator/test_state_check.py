"""`loco state check` against damage: a byte flipped anywhere in any file that a run is made from.

Compared with: the sound directory, whose check finds nothing. Every flip must be found and its file
named; in the journal, whose pages have room that means nothing, a flip is found or has changed
nothing that can be read. Run alone: pytest tests/coordinator/test_state_check.py
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import run_loco
from support.live import Member, coordinating, eventually
from support.runs import LAYOUT, config_of, create_store, vector

from coordinator.chain import FILE
from coordinator.check import Verdict, check_state
from coordinator.events import Event
from coordinator.journal import Journal

CONFIG = config_of(
    quorum={"min_sites": 2},
    run={"rounds": 20},
    state={"snapshot_every_rounds": 2, "keep_updates": 3},
    outer={"aggregation": "nesterov"},  # which has the third buffer
    codec={"bits": 32},
)
KINDS = {
    "theta": "snapshots/*/theta",
    "residual": "snapshots/*/residual",
    "momentum": "snapshots/*/momentum",
    "manifest": "snapshots/*/manifest.json",
    "contribution": "contributions/*/*",
    "update": "updates/*",
    "chain": FILE,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five rounds by a real coordinator, with a contribution to the sixth."""
    directory = tmp_path_factory.mktemp("sound")
    with (
        coordinating(create_store(directory, CONFIG)) as coordinator,
        Member(coordinator, "paris", ranks=2) as paris,
        Member(coordinator, "oslo") as oslo,
    ):
        paris.enter()
        oslo.enter()
        for round_ in range(6):
            eventually(lambda: coordinator.state.phase == "open", "a round is open")
            paris.contribute(round_, vector(LAYOUT, 2 * round_, scale=1e-2))
            if round_ == 5:
                break
            oslo.contribute(round_, vector(LAYOUT, 2 * round_ + 1, scale=1e-2))
            eventually(lambda: coordinator.state.round > round_, "it is committed")  # noqa: B023
    assert check_state(directory).faults == []
    return directory


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "state"))


def flip(path: Path, at: int, bit: int) -> bytes:
    """Flip one bit; returns what the file held before."""
    before = path.read_bytes()
    data = bytearray(before)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return before


def places(path: Path, count: int) -> Iterator[tuple[int, int]]:
    """The first byte, the last one and seeded ones between."""
    rng, size = random.Random(path.name), path.stat().st_size
    yield from ((at, rng.randrange(8)) for at in (0, size - 1))
    yield from ((rng.randrange(size), rng.randrange(8)) for _ in range(count - 2))


def names(verdict: Verdict, path: Path) -> bool:
    return any(str(path) in fault for fault in verdict.faults)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_found_and_its_file_named(copy: Path, kind: str) -> None:
    files = sorted(copy.glob(KINDS[kind]))
    assert files
    for path in files:
        for at, bit in places(path, 4):
            before = flip(path, at, bit)
            assert names(check_state(copy), path), f"bit {bit} of byte {at} of {path}"
            path.write_bytes(before)
    assert check_state(copy).faults == []


def test_every_single_byte_of_a_manifest_counts(copy: Path) -> None:
    """It holds the state: a changed token count would be nowhere else to be seen."""
    path = min(copy.glob(KINDS["manifest"]))
    for at in range(0, path.stat().st_size, 7):
        before = flip(path, at, 0)
        assert names(check_state(copy), path), f"byte {at}"
        path.write_bytes(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_gone_is_named(copy: Path, kind: str) -> None:
    for path in sorted(copy.glob(KINDS[kind])):
        if kind in ("manifest", "chain"):
            continue  # a crash may leave a snapshot without one; plaintext runs need no chain
        data = path.read_bytes()
        path.unlink()
        assert names(check_state(copy), path)
        path.write_bytes(data)


def read(path: Path) -> tuple[dict[str, str], list[tuple[float, Event]]]:
    journal = Journal(path)
    try:
        return journal.facts(), list(journal.replay(after=0))
    finally:
        journal.close()


def test_a_flipped_byte_of_the_journal_is_found_or_changes_nothing(copy: Path) -> None:
    path = copy / "journal.sqlite"
    before, found = read(path), 0
    data = path.read_bytes()
    for at, bit in places(path, 120):
        flip(path, at, bit)
        faults = check_state(copy).faults
        assert all("journal" in fault or "event" in fault for fault in faults), faults
        found += bool(faults)
        if not faults:
            assert read(path) == before, f"bit {bit} of byte {at}"
        for leftover in copy.glob("journal.sqlite*"):
            leftover.unlink()
        path.write_bytes(data)
    assert found > 10, "most of a short journal is room for more"


@pytest.mark.parametrize("text", [b'"tokens":100', b'"num_shards":2', b'"rounds":20', b"test-run"])
def test_a_changed_number_in_the_journal_is_found(copy: Path, text: bytes) -> None:
    """What is still valid for SQLite and JSON, and would lead to another run."""
    path = copy / "journal.sqlite"
    data = path.read_bytes()
    at = data.index(text) + len(text) - 1
    flip(path, at, 0)
    faults = check_state(copy).faults
    assert any("journal" in fault and "damaged" in fault for fault in faults), faults


def test_the_command_names_the_fault_and_ends_with_1(copy: Path) -> None:
    assert run_loco("state", "check", str(copy)).returncode == 0
    (path,) = copy.glob("contributions/5/paris.1.1.*")
    flip(path, 50, 3)
    told = run_loco("state", "check", str(copy))
    assert told.returncode == 1
    assert f"fault: {path} has not the digest" in told.stdout
    as_json = json.loads(run_loco("state", "check", str(copy), "--json").stdout)
    assert str(path) in as_json["faults"][0]


def test_a_damaged_journal_ends_a_coordinator_with_one_line(copy: Path) -> None:
    path = copy / "journal.sqlite"
    path.write_bytes(b"no database at all" * 100)
    told = run_loco("state", "check", str(copy))
    assert told.returncode == 1
    assert f"the journal {path} cannot be opened: file is not a database" in told.stdout
