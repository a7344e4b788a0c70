"""Documents, cut in items that are tokenised independently.

    .txt       a document a file; a file larger than 1 MiB is cut at line ends into several
    .jsonl     a document a line, in one field; half a surrogate pair, as in "\\ud83d", is no text
               and becomes U+FFFD
    .parquet   a document a row, in one column (needs pyarrow)
    hf:NAME    a data set of the `datasets` library (`loco.tokens.hub`)

An item is a pure function of the files' sizes, so that work that was interrupted is cut alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loco.errors import ConfigError, DataError, install_extra
from loco.tokens.hub import PREFIX, StreamPart, stream_parts

KINDS = (".txt", ".jsonl", ".parquet")
DOCUMENT_BYTES = 1 << 20
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes `start` to `stop` of a text or jsonl file, or those row groups of a parquet file."""

    path: Path
    start: int
    stop: int
    size_bytes: int
    """About as much text."""

    def documents(self, field: str) -> Iterator[str]:
        """The texts, in order."""
        read = {".txt": _texts, ".jsonl": _lines, ".parquet": _rows}[self.path.suffix.lower()]
        return read(self, field)

    @property
    def place(self) -> str:
        """For errors."""
        unit = "row groups" if self.path.suffix.lower() == ".parquet" else "bytes"
        return f"{self.path}, {unit} {self.start} to {self.stop}"

    @property
    def source(self) -> str:
        """What the tokens depend on: the file's place, size and time."""
        found = self.path.stat()
        return f"{self.path.resolve()} {found.st_size} {found.st_mtime_ns}"


@dataclass(frozen=True, kw_only=True)
class Item:
    """The parts that one process tokenises; their shards are made and lost together."""

    number: int
    parts: tuple[Part | StreamPart, ...]
    field: str
    """Of jsonl and parquet."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def place(self) -> str:
        """For errors."""
        first, last = self.parts[0].place, self.parts[-1].place
        return first if first == last else f"{first} up to {last}"

    def documents(self) -> Iterator[str]:
        """The texts, in order; DataError names file and place of what cannot be read."""
        for part in self.parts:
            yield from part.documents(self.field)


def cut_items(inputs: list[str], *, field: str, item_bytes: int) -> list[Item]:
    """All of the inputs in items of about `item_bytes`; DataError if one is not there."""
    parts = (part for text in inputs for part in _parts_of(text, item_bytes))
    return [
        Item(number=number, parts=together, field=field)
        for number, together in enumerate(group_parts(parts, item_bytes))
    ]


def group_parts(
    parts: Iterable[Part | StreamPart], item_bytes: int
) -> Iterator[tuple[Part | StreamPart, ...]]:
    """Successive parts of files, `item_bytes` or more together but for the last; streams alone."""
    waiting: list[Part | StreamPart] = []
    size = 0
    for part in parts:
        if isinstance(part, StreamPart):
            yield (part,)
            continue
        waiting.append(part)
        size += part.size_bytes
        if size >= item_bytes:
            yield tuple(waiting)
            waiting, size = [], 0
    if waiting:
        yield tuple(waiting)


def _parts_of(text: str, item_bytes: int) -> Iterator[Part | StreamPart]:
    if text.startswith(PREFIX):
        yield from stream_parts(text)
        return
    for path in _files(Path(text).expanduser()):
        yield from _parts(path, item_bytes)


def skipped_files(inputs: list[str]) -> list[Path]:
    """The files in directories among the inputs that are of no kind that is read."""
    directories = [Path(text).expanduser() for text in inputs if not text.startswith(PREFIX)]
    return [
        path
        for directory in directories
        if directory.is_dir()
        for path in _all_files(directory)
        if path.suffix.lower() not in KINDS
    ]


def _all_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _files(path: Path) -> list[Path]:
    """A file, or those of a directory by name, of the kinds that are read."""
    if not path.exists():
        raise DataError(f"input {path} does not exist")
    found = _all_files(path)
    known = [p for p in found if p.suffix.lower() in KINDS]
    if not known:
        raise DataError(f"input {path} holds no file of the kinds {', '.join(KINDS)}")
    return known


def _parts(path: Path, item_bytes: int) -> Iterator[Part]:
    if path.suffix.lower() == ".parquet":
        yield from _row_groups(path)
        return
    size = path.stat().st_size
    for start in range(0, size, item_bytes):
        stop = min(size, start + item_bytes)
        yield Part(path=path, start=start, stop=stop, size_bytes=stop - start)


def _whole_lines(part: Part) -> Iterator[bytes]:
    """The lines that begin inside the part."""
    try:
        with part.path.open("rb") as file:
            if part.start:
                file.seek(part.start - 1)
                file.readline()
            while file.tell() < part.stop and (line := file.readline()):
                yield line
    except OSError as error:
        raise DataError(f"cannot read {part.path}: {error.strerror}") from error


def _texts(part: Part, _field: str) -> Iterator[str]:
    waiting, size = [], 0
    for line in _whole_lines(part):
        waiting.append(line)
        size += len(line)
        if size >= DOCUMENT_BYTES:
            yield _decode(b"".join(waiting), part)
            waiting, size = [], 0
    if waiting:
        yield _decode(b"".join(waiting), part)


def _lines(part: Part, field: str) -> Iterator[str]:
    for line in _whole_lines(part):
        if not line.strip():
            continue
        try:
            record = json.loads(_decode(line, part))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{part.path}: the line {_shown(line)} is not JSON: {error}") from error
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            known = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(
                f"{part.path}: the line {_shown(line)} has no text in field {field!r} (it has "
                f"{known}): choose another --field"
            )
        # json has joined whole pairs; a half comes from an escape only, and UTF-8 cannot hold it.
        yield _SURROGATES.sub("\ufffd", text) if b"\\u" in line else text


def _row_groups(path: Path) -> Iterator[Part]:
    file = _parquet(path)
    for number in range(file.num_row_groups):
        size = file.metadata.row_group(number).total_byte_size
        yield Part(path=path, start=number, stop=number + 1, size_bytes=size)


def _rows(part: Part, field: str) -> Iterator[str]:
    file = _parquet(part.path)
    if field not in file.schema_arrow.names:
        raise DataError(
            f"{part.path} has no column {field!r} (it has {', '.join(file.schema_arrow.names)}): "
            "choose another --field"
        )
    for number in range(part.start, part.stop):
        for text in file.read_row_group(number, columns=[field])[field].to_pylist():
            if not isinstance(text, str):
                raise DataError(f"{part.path}: a row's {field!r} is {text!r}, not text")
            yield text


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(f"{path} needs the pyarrow library: {install_extra('hf')}") from None
    try:
        return ParquetFile(path)
    except (OSError, ArrowException) as error:
        raise DataError(f"{path} is not a parquet file: {error}") from error


def _decode(text: bytes, part: Part) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{part.path} is not UTF-8 near {_shown(text[max(0, error.start - 20) :])}: convert it"
        ) from error


def _shown(line: bytes) -> str:
    return repr(line[:60])
