"""Names and bytes that must outlive a power cut: what is synced, and that nothing is half written.

Compared with: the directories that a file's path consists of. Run alone:
pytest tests/coordinator/test_files.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.disk import files_up_to

from coordinator import files
from coordinator.files import append_synced, rename_synced, write_aside


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories whose names are made durable, in order."""
    really, seen = files.sync_directory, []

    def note(path: Path) -> None:
        seen.append(path)
        really(path)

    monkeypatch.setattr(files, "sync_directory", note)
    return seen


def test_a_new_directory_has_its_own_name_synced_too(tmp_path: Path, synced: list[Path]) -> None:
    """A file in it is not there after a power cut if the directory is not."""
    directory = tmp_path / "contributions" / "7"
    with write_aside(directory / "paris") as file:
        file.write(b"all of it")
    assert synced == [tmp_path, tmp_path / "contributions", directory]
    synced.clear()
    rename_synced(directory / "paris", tmp_path / "contributions" / "8" / "paris")
    assert synced == [tmp_path / "contributions", tmp_path / "contributions" / "8"]


def test_what_cannot_be_appended_wholly_is_not_appended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_synced(path, b"one\n")
    append_synced(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    with files_up_to(10), pytest.raises(OSError, match="File too large"):
        append_synced(path, b"three\n")
    assert path.read_bytes() == b"one\ntwo\n"
