"""`loco data prepare` against documents joined by hand, against itself interrupted, and damaged.

Run alone: pytest tests/loco/tokens/test_prepare.py
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from support.cluster import run_loco
from support.corpora import DOCUMENTS, HELD_OUT, make_tokenizer, options, write_jsonl
from tokenizers import Tokenizer

from loco.config import ModelConfig
from loco.data import load_tokens
from loco.errors import ConfigError, DataError
from loco.model import build_model
from loco.tokens import check_prepared, load_prepared
from loco.tokens.prepare import prepare
from loco.tokens.prepared import MANIFEST, Manifest, Shard, dump
from loco.tokens.sources import Part, cut_items, group_parts


def is_held_out(text: str) -> bool:
    return xxhash.xxh3_64_intdigest(text.encode()) % 1_000_000 < HELD_OUT * 1_000_000


def expected(documents: list[str], *, held_out: bool) -> bytes:
    return b"".join(f"{d}\n\n".encode() for d in documents if is_held_out(d) == held_out)


def quiet(done: int, total: int) -> None:
    pass


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_tokens_are_the_documents_each_ended_by_an_empty_line(tmp_path: Path) -> None:
    manifest = prepare(options([write_jsonl(tmp_path / "a.jsonl")], tmp_path / "out"), quiet)
    assert len({shard.file for shard in manifest.shards if shard.split == "train"}) > 4
    for split, held_out in (("train", False), ("validation", True)):
        tokens = load_tokens(str(tmp_path / "out"), split)  # type: ignore[arg-type]
        assert tokens.tobytes() == expected(DOCUMENTS, held_out=held_out)
        assert tokens.vocab_size == 256
    assert sum(shard.num_documents for shard in manifest.shards) == len(DOCUMENTS)
    raw = sum(len(d.encode()) for d in DOCUMENTS)
    assert sum(shard.num_bytes for shard in manifest.shards) == raw
    assert check_prepared(tmp_path / "out") == []
    assert all(name == MANIFEST or name.endswith(".npy") for name in files_of(tmp_path / "out"))


def test_two_processes_give_the_same_files_as_one(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    for jobs in (1, 2):
        prepare(options([source], tmp_path / str(jobs), jobs=jobs), quiet)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")


def test_interrupted_work_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    whole = prepare(options([source], tmp_path / "whole"), quiet)
    half = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal half
        half = done
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options([source], tmp_path / "out"), interrupt)
    assert not (tmp_path / "out" / MANIFEST).exists()
    with pytest.raises(DataError, match=r"holds no manifest\.json that can be read"):
        check_prepared(tmp_path / "out")
    kept = {n: (tmp_path / "out" / n).stat().st_mtime_ns for n in ("train-00000.npy",)}
    (tmp_path / "out" / "train-00009.partial").write_bytes(b"torn")
    told: list[int] = []
    assert prepare(options([source], tmp_path / "out"), lambda d, t: told.append(d)) == whole
    assert told[0] >= half  # what was done is not done again
    assert {n: (tmp_path / "out" / n).stat().st_mtime_ns for n in kept} == kept
    (tmp_path / "out" / "train-00009.partial").unlink(missing_ok=True)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert prepare(options([source], tmp_path / "out"), quiet) == whole  # and once more: nothing


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"field": "body"}, "belongs to a corpus with other settings"),
        ({"held_out": 0.5}, "belongs to a corpus with other settings"),
    ],
)
def test_a_directory_of_other_work_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    prepare(options([source], tmp_path / "out"), quiet)
    with pytest.raises(ConfigError, match=said):
        prepare(options([source], tmp_path / "out", **changes), quiet)
    write_jsonl(source, DOCUMENTS[:-1])
    with pytest.raises(ConfigError, match="belongs to a corpus with other sources"):
        prepare(options([source], tmp_path / "out"), quiet)
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        prepare(options([source], tmp_path), quiet)


def test_a_tokenizer_gives_the_ids_of_its_library(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    source = write_jsonl(tmp_path / "a.jsonl")
    out = tmp_path / "out"
    manifest = prepare(options([source], out, tokenizer=str(tmp_path / "tokenizer")), quiet)
    tokens = load_prepared(out, "train")
    end = tokenizer.token_to_id("<end>")
    kept = [d for d in DOCUMENTS if not is_held_out(d)]
    assert tokens[np.arange(len(tokens))].tolist() == [
        token for d in kept for token in [*tokenizer.encode(d).ids, end]
    ]
    assert tokens.shards[0].dtype == np.uint16
    assert tokens.vocab_size == manifest.vocab_size == 300
    assert tokens.bytes_per_token == sum(len(d.encode()) for d in kept) / len(tokens)
    assert (out / "tokenizer.json").read_bytes() == (
        tmp_path / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    with pytest.raises(DataError, match="has no token '<stop>': name the one that ends"):
        prepare(
            options(
                [source],
                tmp_path / "b",
                tokenizer=str(tmp_path / "tokenizer"),
                end_of_text="<stop>",
            ),
            quiet,
        )
    (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"no tokenizer_config\.json states an eos_token"):
        prepare(options([source], tmp_path / "b", tokenizer=str(tmp_path / "tokenizer")), quiet)


def test_what_a_tokenizer_states_for_inputs_of_a_model_is_left_aside(tmp_path: Path) -> None:
    """Truncation and padding would cut documents, and fill short ones with PAD."""
    plain = make_tokenizer(tmp_path / "tokenizer")
    limited = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    limited.enable_truncation(max_length=8)
    limited.enable_padding(length=16, pad_token="<end>")
    limited.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl")
    flags = options([source], tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), held_out=0.0)
    prepare(flags, quiet)
    tokens = load_prepared(tmp_path / "out", "train")
    end = plain.token_to_id("<end>")
    assert tokens[np.arange(len(tokens))].tolist() == [
        token for d in DOCUMENTS for token in [*plain.encode(d).ids, end]
    ]


def test_the_vocabulary_reaches_to_the_largest_token_also_where_numbers_are_left_out(
    tmp_path: Path,
) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    described = json.loads(path.read_text())
    (end,) = described["added_tokens"]
    described["model"]["vocab"]["<end>"] = end["id"] = 1000
    path.write_text(json.dumps(described))
    source = write_jsonl(tmp_path / "a.jsonl")
    flags = options([source], tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))
    assert prepare(flags, quiet).vocab_size == 1001
    assert check_prepared(tmp_path / "out") == []


def test_parquet_and_jsonl_of_the_same_documents_are_the_same_tokens(tmp_path: Path) -> None:
    table = pa.table({"text": DOCUMENTS, "n": list(range(len(DOCUMENTS)))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    prepare(options([tmp_path / "a.parquet"], tmp_path / "out"), quiet)
    assert load_prepared(tmp_path / "out", "train").tobytes() == expected(DOCUMENTS, held_out=False)


@pytest.mark.slow
def test_a_streamed_data_set_is_the_same_tokens_and_resumes_by_shard(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "a.jsonl", DOCUMENTS[:150])
    write_jsonl(tmp_path / "set" / "b.jsonl", DOCUMENTS[150:])
    flags = options([], tmp_path / "out", item_bytes=1)
    flags = replace(flags, inputs=[f"hf:{tmp_path}/set@train"])

    def interrupt(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(flags, interrupt)
    first = (tmp_path / "out" / "train-00000.npy").stat().st_mtime_ns
    prepare(flags, quiet)
    assert (tmp_path / "out" / "train-00000.npy").stat().st_mtime_ns == first
    assert load_prepared(tmp_path / "out", "train").tobytes() == expected(DOCUMENTS, held_out=False)
    with pytest.raises(DataError, match=r"has no text in column 'body' \(it has text, id\)"):
        prepare(replace(flags, field="body", out=tmp_path / "other"), quiet)
    with pytest.raises(DataError, match=r"cannot open hf:.*@nothing"):
        prepare(replace(flags, inputs=[f"hf:{tmp_path}/set@nothing"]), quiet)


def test_a_text_file_is_one_document_and_a_directory_is_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    texts = [f"line one of {i}\nline two\n" for i in range(40)]
    for i, text in enumerate(texts):
        (tmp_path / "in" / f"{i:02}.txt").write_text(text)
    prepare(options([tmp_path / "in"], tmp_path / "out", item_bytes=200), quiet)
    assert load_prepared(tmp_path / "out", "train").tobytes() == expected(texts, held_out=False)


@given(item_bytes=st.integers(1, 2000), lengths=st.lists(st.integers(0, 300), max_size=12))
@settings(deadline=None, max_examples=60)
def test_cutting_a_file_anywhere_neither_loses_nor_repeats_a_line(
    item_bytes: int, lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    documents = [f"{i}{'é' * length}" for i, length in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents))
    items = cut_items([str(path)], field="text", item_bytes=item_bytes)
    assert [d for item in items for d in item.documents()] == documents


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', r"no text in field 'text' \(it has body\)"),
        ("a.jsonl", b'{"text": 5}\n', "no text in field 'text'"),
        ("a.jsonl", b"[1]\n", "no text in field 'text'"),
        ("a.jsonl", b'{"text"\n', "is not JSON"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, "is not JSON: .*recursion"),
        ("a.txt", b"fine \xff not", "is not UTF-8 near"),
        ("a.parquet", b"PAR1", "is not a parquet file"),
        ("a.txt", b"", "the inputs are empty"),
        ("a.csv", b"x", r"holds no file of the kinds \.txt, \.jsonl, \.parquet"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        prepare(options([tmp_path / name], tmp_path / "out"), quiet)


def test_what_nobody_thought_of_names_the_item_too(tmp_path: Path) -> None:
    """A library's own exception, from a page that is damaged: its footer is fine."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"text": DOCUMENTS}), path, compression="zstd")
    raw = bytearray(path.read_bytes())
    raw[4:200] = bytes(196)
    path.write_bytes(raw)
    said = r"cannot tokenise .*a\.parquet, row groups 0 to 1: \w+: .*; what is done stays"
    with pytest.raises(DataError, match=said):
        prepare(options([path], tmp_path / "out"), quiet)


def test_a_missing_library_is_installed_from_this_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as loco[hf]: on an index that name may be another project's."""
    for library in ("tokenizers", "datasets", "pyarrow.parquet", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    for name in ("a.parquet", "a.txt", "tokenizer.json"):
        (tmp_path / name).write_text("x")
    flags = options([tmp_path / "a.txt"], tmp_path / "out")
    for wanted in (
        replace(flags, inputs=["hf:x"]),
        replace(flags, inputs=[str(tmp_path / "a.parquet")]),
        replace(flags, tokenizer=str(tmp_path / "tokenizer.json"), end_of_text="<end>"),
    ):
        with pytest.raises(ConfigError, match=r"library: run pip install '\.\[hf\]' in a checkout"):
            prepare(wanted, quiet)
    with pytest.raises(ConfigError, match=r"library: run pip install '\.\[hf\]' in a checkout"):
        build_model(ModelConfig(hf="./x", seq_len=8), seed=0)


def test_too_few_documents_to_hold_one_out_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:3])
    with pytest.raises(DataError, match="none of 3 documents was held out"):
        prepare(options([source], tmp_path / "out", held_out=1e-6), quiet)


def test_damage_is_found(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(options([write_jsonl(tmp_path / "a.jsonl")], out), quiet)
    first, second, third = sorted(out.glob("train-*.npy"))[:3]
    raw = bytearray(first.read_bytes())
    raw[-5] ^= 1
    first.write_bytes(raw)
    second.write_bytes(second.read_bytes()[:-1])
    third.unlink()
    faults = check_prepared(out)
    assert [str(path) in fault for path, fault in zip((first, second, third), faults, strict=True)]
    assert "another digest" in faults[0]
    with pytest.raises(DataError, match="cannot read the token file"):
        load_prepared(out, "train")
    manifest = Manifest.model_validate_json((out / MANIFEST).read_text())
    assert len(manifest.shards) > 3


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_shard_that_was_lost_after_the_end_is_made_again(
    interrupted: bool, tmp_path: Path
) -> None:
    """Bit-equal, and only the items that lost something; also after an end in the middle of it."""
    source, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    whole = prepare(options([source], out), quiet)
    before = files_of(out)
    first, second, third = sorted(out.glob("train-*.npy"))[:3]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(second.read_bytes())
    untouched = {path: path.stat().st_mtime_ns for path in sorted(out.glob("train-*.npy"))[3:]}

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            prepare(options([source], out), interrupt)
    assert prepare(options([source], out), quiet) == whole
    assert files_of(out) == before
    assert {path: path.stat().st_mtime_ns for path in untouched} == untouched


def test_a_shard_that_comes_out_otherwise_than_before_is_refused(tmp_path: Path) -> None:
    """A data set that changed, or another version of a library: now and when asked again."""
    source, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    prepare(options([source], out), quiet)
    path = out / MANIFEST
    first = out / "train-00000.npy"
    found = Manifest.model_validate_json(path.read_text())
    other = found.shards[0].model_copy(update={"digest": "0" * 32})
    path.write_text(dump(found.model_copy(update={"shards": [other, *found.shards[1:]]})))
    first.unlink()
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl, bytes 0 to 3000 are others than"):
            prepare(options([source], out), quiet)


def test_what_an_end_in_the_middle_of_tidying_left_is_removed(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    whole = prepare(options([source], out), quiet)
    before = files_of(out)
    (out / "work.json").write_text(dump(whole))
    mine = [shard for shard in whole.shards if "-00001" in shard.file]
    (out / "item-00001.json").write_bytes(TypeAdapter(list[Shard]).dump_json(mine))
    assert prepare(options([source], out), quiet) == whole
    assert files_of(out) == before


@pytest.mark.parametrize("tokenizer", ["bytes", "file"])
def test_half_a_surrogate_pair_becomes_the_replacement_character(
    tokenizer: str, tmp_path: Path
) -> None:
    """JSON can hold it, UTF-8 and text cannot. Whole pairs are characters."""
    make_tokenizer(tmp_path / "file")
    flags = {"tokenizer": tokenizer if tokenizer == "bytes" else str(tmp_path / "file")}
    for name, text in (("a", r"ab \ud83d \ude00\ud83d\ude00\\ud83d"), ("b", "ab � �😀\\\\ud83d")):
        source = tmp_path / f"{name}.jsonl"
        source.write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
        prepare(options([source], tmp_path / f"out-{name}", **flags, held_out=0.0), quiet)
    ours, theirs = (load_prepared(tmp_path / f"out-{name}", "train") for name in "ab")
    assert ours.tobytes() == theirs.tobytes()
    assert ours.num_bytes == len("ab � �😀\\ud83d".encode())


def test_more_text_than_a_shard_holds_becomes_several(tmp_path: Path) -> None:
    """One row group is one item, as a shard of a streamed data set is; memory stays that of one."""
    table = pa.table({"text": DOCUMENTS})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=len(DOCUMENTS))
    out = tmp_path / "out"
    manifest = prepare(options([tmp_path / "a.parquet"], out), quiet)
    train = [shard for shard in manifest.shards if shard.split == "train"]
    assert [shard.file for shard in train[:2]] == ["train-00000.npy", "train-00000-1.npy"]
    longest = max(len(d.encode()) for d in DOCUMENTS)
    assert all(3000 <= shard.num_bytes < 3000 + longest for shard in train[:-1])
    assert load_prepared(out, "train").tobytes() == expected(DOCUMENTS, held_out=False)
    before = files_of(out)
    (out / "train-00000-1.npy").unlink()
    assert prepare(options([tmp_path / "a.parquet"], out), quiet) == manifest
    assert files_of(out) == before


def test_many_small_files_are_grouped_in_linear_time(tmp_path: Path) -> None:
    """A sum over all that waits would take half a minute here."""
    parts = [Part(path=tmp_path / "a.txt", start=0, stop=1, size_bytes=1)] * 30_000
    before = time.process_time()
    groups = list(group_parts(parts, 20_000))
    assert time.process_time() - before < 2
    assert [len(group) for group in groups] == [20_000, 10_000]


def test_other_files_in_a_directory_are_named_and_capitals_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.TXT", "b.jsonl.gz", "c.zst", "d.txt"):
        (tmp_path / "in" / name).write_text(f"text of {name}")
    done = run_loco(
        "data", "prepare", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--held-out", "0"
    )
    assert done.returncode == 0, done.stderr
    assert "train: 30 tokens of 2 documents" in done.stdout
    assert "skipped 2 files that are none of .txt, .jsonl, .parquet: " in done.stderr
    assert "b.jsonl.gz" in done.stderr
    assert "c.zst" in done.stderr


def test_the_commands(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    done = run_loco("data", "prepare", str(source), "--out", str(out), "--held-out", "0.2")
    assert done.returncode == 0, done.stderr
    kept = sum(not is_held_out(d) for d in DOCUMENTS)
    assert f"of {kept} documents, 1 shards" in done.stdout
    assert run_loco("data", "check", str(out)).stdout == "2 shards: 0 faults\n"
    (out / "train-00000.npy").unlink()
    assert run_loco("data", "check", str(out)).returncode == 1
    again = run_loco("data", "prepare", str(source), "--out", str(out), "--held-out", "1.5")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "loco: --held-out 1.5 is out of range: 0 to below 1\n"
