"""`loco data prepare`: tokenise files in parallel into a directory of token shards.

Each item of text becomes shards of its own, written aside and renamed; work that was interrupted at
any moment goes on with the items that are missing, and ends with the same bytes; so does finished
work that lost a shard. Which documents are held out for validation is a function of their text, so
that copies of one never lie on both sides.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import xxhash
from pydantic import TypeAdapter

from loco.digest import file_digest
from loco.errors import ConfigError, DataError, LocoError
from loco.tokens.prepared import (
    MANIFEST,
    Manifest,
    Shard,
    Split,
    dump,
    item_number,
    read_manifest,
    shard_file,
    torn,
)
from loco.tokens.shards import BYTES, Array
from loco.tokens.sources import Item, cut_items
from loco.tokens.tokenizer import end_of_text, make_encoder, tokenizer_file

WORK = "work.json"  # the manifest of what is being made, without shards
TOKENIZER = "tokenizer.json"
MEMORY = "use fewer --jobs, then start again: what is done stays"
BATCH = 256  # documents tokenised at a time
HELD_OUT_STEPS = 1_000_000
_SHARDS = TypeAdapter(list[Shard])


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of `loco data prepare`."""

    inputs: list[str]
    """Files, directories of files, or `hf:PATH_OR_ID@SPLIT`."""
    out: Path
    tokenizer: str
    """`bytes`, a tokenizer.json, or a directory that holds one."""
    end_of_text: str | None
    """Token after each document; None: what the tokenizer's directory states."""
    field: str
    """Field or column with the text, in jsonl and parquet."""
    held_out: float
    """Share of the documents that become the validation split."""
    jobs: int
    """Processes."""
    item_bytes: int
    """Text of one shard, about."""


Progress = Callable[[int, int], None]
"""Called with (bytes of text done, all bytes)."""


def prepare(options: Options, progress: Progress) -> Manifest:
    """Make `options.out`, or what is missing of it; returns its manifest.

    Raises:
        ConfigError: an option out of range, or `out` belongs to other inputs or settings.
        DataError: an input that cannot be read; shards made before it stay for the next try.
    """
    _check(options)
    items = cut_items(options.inputs, field=options.field, item_bytes=options.item_bytes)
    if not items:
        raise DataError(f"the inputs are empty: {', '.join(options.inputs)}")
    wanted = _wanted(options, items)
    if (options.out / MANIFEST).exists():
        return _mend(options, wanted, items, progress)
    _begin(options, wanted)
    _make_missing(options, wanted, items, progress)
    return _finish(options.out, wanted, items)


def _check(options: Options) -> None:
    if not 0 <= options.held_out < 1:
        raise ConfigError(f"--held-out {options.held_out} is out of range: 0 to below 1")
    if not 1 <= options.jobs <= 1024:
        raise ConfigError(f"--jobs {options.jobs} is out of range: 1 to 1024")
    if options.tokenizer == BYTES and options.end_of_text is not None:
        raise ConfigError(
            "--end-of-text goes with a tokenizer.json; bytes end a document with an empty line"
        )


def _wanted(options: Options, items: list[Item]) -> Manifest:
    """The manifest that this work will have, but for its shards."""
    name, digest, end = BYTES, "", ""
    if options.tokenizer != BYTES:
        file = tokenizer_file(options.tokenizer)
        name, digest = str(file.resolve()), file_digest(file).hex()
        end = options.end_of_text or end_of_text(file)
    sources = dict.fromkeys(part.source for item in items for part in item.parts)
    return Manifest(
        tokenizer=name,
        tokenizer_digest=digest,
        vocab_size=make_encoder(name, end).vocab_size,
        settings={
            "end_of_text": end,
            "field": options.field,
            "held_out": str(options.held_out),
            "item_bytes": str(options.item_bytes),
        },
        sources=list(sources),
        shards=[],
    )


def _mend(options: Options, wanted: Manifest, items: list[Item], progress: Progress) -> Manifest:
    """What was finished before; items with a missing or torn shard are made again, bit-equal."""
    out = options.out
    found = read_manifest(out)
    _refuse_other_work(out, found, wanted)
    of_item: dict[int, list[Shard]] = {item.number: [] for item in items}
    for shard in found.shards:
        of_item[item_number(shard.file)].append(shard)
    lost = [item for item in items if torn(out, of_item[item.number])]
    for item in lost:
        _record(out, item).unlink(missing_ok=True)
    if lost:
        _make_missing(options, wanted, lost, progress)
    for item in items:
        if (record := _record(out, item)).exists():
            _refuse_other_tokens(out, item, _shards_in(record), of_item[item.number])
    _tidy(out, items)
    return found


def _refuse_other_tokens(out: Path, item: Item, made: list[Shard], before: list[Shard]) -> None:
    if made != before:
        raise DataError(
            f"the shards of {item.place} are others than {out / MANIFEST} says: what was read, or "
            "the library of the tokenizer, is no longer the same; prepare into another --out"
        )


def _begin(options: Options, wanted: Manifest) -> None:
    out = options.out
    if (out / WORK).exists():
        started = Manifest.model_validate_json((out / WORK).read_text(encoding="utf-8"))
        _refuse_other_work(out, started, wanted)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory: choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if wanted.tokenizer != BYTES:
            shutil.copyfile(wanted.tokenizer, out / TOKENIZER)
        _write_aside(out / WORK, dump(wanted).encode())
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror}") from error


def _refuse_other_work(out: Path, found: Manifest, wanted: Manifest) -> None:
    for key, value in wanted.model_dump(exclude={"shards"}).items():
        if getattr(found, key) != value:
            raise ConfigError(
                f"{out} belongs to a corpus with other {key}: it was {getattr(found, key)!r}, now "
                f"it is {value!r}; choose another --out"
            )


def _make_missing(
    options: Options, wanted: Manifest, items: list[Item], progress: Progress
) -> None:
    total = sum(item.size_bytes for item in items)
    missing = [item for item in items if not _record(options.out, item).exists()]
    done = total - sum(item.size_bytes for item in missing)
    progress(done, total)
    for item in _in_processes(options, wanted, missing):
        done += item.size_bytes
        progress(done, total)


def _in_processes(options: Options, wanted: Manifest, items: list[Item]) -> Iterator[Item]:
    """Each item once it is made; few wait in the queue, so that Ctrl+C ends soon."""
    context = multiprocessing.get_context("spawn")  # gRPC and tokenizers do not survive a fork
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        waiting = iter(items)
        running: dict[Future[None], Item] = {}
        try:
            while True:
                while len(running) < 2 * options.jobs and (item := next(waiting, None)):
                    running[pool.submit(make_shard, item, options.out, wanted)] = item
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    yield running.pop(future)
        except BrokenProcessPool as error:
            raise LocoError(
                f"a process that tokenised was killed, probably for want of memory: {MEMORY}"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def make_shard(item: Item, out: Path, wanted: Manifest) -> None:
    """Tokenise one item and write its token files, then the record of them.

    LocoError of any kind whatever goes wrong: another exception may not survive the way to the
    process that waits, and would not say where it happened.
    """
    try:
        shards = _tokenise(item, out, wanted)
        with _room(out):
            _write_aside(_record(out, item), _SHARDS.dump_json(shards))
    except (LocoError, KeyboardInterrupt, SystemExit):
        raise
    except MemoryError as error:
        raise LocoError(f"no memory for {item.place}: {MEMORY}") from error
    except BaseException as error:  # a panic of a library in Rust is no Exception
        first = next(iter(str(error).strip().splitlines()), "")
        raise DataError(
            f"cannot tokenise {item.place}: {type(error).__name__}: {first}; what is done stays"
        ) from error


def _tokenise(item: Item, out: Path, wanted: Manifest) -> list[Shard]:
    encoder = make_encoder(wanted.tokenizer, wanted.settings["end_of_text"])
    held_out = round(float(wanted.settings["held_out"]) * HELD_OUT_STEPS)
    item_bytes = int(wanted.settings["item_bytes"])
    train, validation = (
        _Writer(out, split, item.number, encoder.vocab_size, item_bytes)
        for split in get_args(Split)
    )
    for documents in _batches(item.documents()):
        for text, tokens in zip(documents, encoder.encode(documents), strict=True):
            raw = text.encode()
            kept = xxhash.xxh3_64_intdigest(raw) % HELD_OUT_STEPS >= held_out
            (train if kept else validation).add(tokens, len(raw))
    return [*train.close(), *validation.close()]


@contextmanager
def _room(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocoError(
            f"cannot write a shard to {out}: {error}; make room, then start again: what is done "
            "stays"
        ) from error


class _Writer:
    """Writes the tokens of one split of an item: a file whenever `item_bytes` of text are there."""

    def __init__(
        self, out: Path, split: Split, item: int, vocab_size: int, item_bytes: int
    ) -> None:
        self._out, self._split, self._item, self._item_bytes = out, split, item, item_bytes
        self._dtype = np.min_scalar_type(vocab_size - 1)
        self._shards: list[Shard] = []
        self._tokens: list[Array] = []
        self._num_bytes = 0

    def add(self, tokens: Array, num_bytes: int) -> None:
        self._tokens.append(tokens.astype(self._dtype, copy=False))
        self._num_bytes += num_bytes
        if self._num_bytes >= self._item_bytes:
            self._flush()

    def close(self) -> list[Shard]:
        """All that was written, in order."""
        if self._tokens:
            self._flush()
        return self._shards

    def _flush(self) -> None:
        with _room(self._out):
            self._shards.append(self._write())
        self._tokens, self._num_bytes = [], 0

    def _write(self) -> Shard:
        tokens = np.concatenate(self._tokens)
        path = self._out / shard_file(self._split, self._item, len(self._shards))
        aside = path.with_suffix(".partial")
        with aside.open("wb") as file:
            np.save(file, tokens, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        return Shard(
            split=self._split,
            file=path.name,
            num_tokens=len(tokens),
            num_bytes=self._num_bytes,
            num_documents=len(self._tokens),
            digest=file_digest(path).hex(),
        )


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Documents without text are left out: they would only separate."""
    batch: list[str] = []
    for text in documents:
        if text:
            batch.append(text)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _finish(out: Path, wanted: Manifest, items: list[Item]) -> Manifest:
    shards = [shard for item in items for shard in _shards_in(_record(out, item))]
    if not any(shard.split == "train" for shard in shards):
        raise DataError("the inputs hold no text to train on")
    if float(wanted.settings["held_out"]) and not any(s.split == "validation" for s in shards):
        raise DataError(
            f"none of {sum(s.num_documents for s in shards)} documents was held out for "
            f"validation at --held-out {wanted.settings['held_out']}: raise it, in another --out"
        )
    manifest = wanted.model_copy(update={"shards": shards})
    _write_aside(out / MANIFEST, dump(manifest).encode())
    _tidy(out, items)
    return manifest


def _tidy(out: Path, items: list[Item]) -> None:
    """Without what only unfinished work needs; it may have ended in the middle of this."""
    for item in items:
        _record(out, item).unlink(missing_ok=True)
    (out / WORK).unlink(missing_ok=True)


def _shards_in(record: Path) -> list[Shard]:
    return _SHARDS.validate_json(record.read_bytes())


def _record(out: Path, item: Item) -> Path:
    return out / f"item-{item.number:05}.json"


def _write_aside(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".partial")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
