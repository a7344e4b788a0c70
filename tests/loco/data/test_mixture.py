"""Mixtures and shards against plain concatenation and counting.

Run alone: pytest tests/loco/data/test_mixture.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loco.data import DataStream, Weighted, bytes_per_token, check_vocabulary, load_parts
from loco.data.mixture import BLOCK, assign, parse_mixture, shares
from loco.errors import DataError
from loco.tokens import Tokens, join


def tokens_of(*shards: np.ndarray, num_bytes: int = 0) -> Tokens:
    return Tokens(shards, vocab_size=60_000, num_bytes=num_bytes)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(sum),
    data=st.data(),
)
@settings(deadline=None)
def test_shards_read_as_one(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    tokens = tokens_of(*np.split(whole, np.cumsum(lengths)[:-1]))
    index = data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=40))
    at = np.array(index)[:, None]
    assert len(tokens) == len(whole)
    assert np.array_equal(tokens[at], whole[at])
    assert tokens.tobytes() == whole.tobytes()


@given(
    weights=st.lists(st.floats(0.05, 100), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_each_block_has_its_shares_and_no_sample_is_lost_or_repeated(
    weights: list[float], seed: int
) -> None:
    weights = [max(weight, max(weights) / 300) for weight in weights]
    per_block = shares(weights)
    assert per_block.sum() == BLOCK
    exact = np.array(weights) / sum(weights) * BLOCK
    assert np.abs(per_block - exact).max() < 1
    part, number = assign(np.arange(3 * BLOCK), per_block, seed=seed, site="paris")
    for p, share in enumerate(per_block):
        assert sorted(number[part == p]) == list(range(3 * share))
        assert np.count_nonzero(part[:BLOCK] == p) == share
    some = np.array([5, 2 * BLOCK + 1, BLOCK])
    again = assign(some, per_block, seed=seed, site="paris")
    assert np.array_equal(again[0], part[some])
    assert np.array_equal(again[1], number[some])


def test_a_mixed_stream_draws_from_every_part_without_losing_a_window() -> None:
    low, high = np.arange(400, dtype=np.uint16), np.arange(10_000, 11_000, dtype=np.uint16)
    parts = [
        Weighted(tokens=tokens_of(low), weight=1.0),
        Weighted(tokens=tokens_of(high), weight=3.0),
    ]
    settings_ = {"seq_len": 4, "batch": 16, "seed": 1, "site": "paris"}
    data = DataStream(parts, **settings_)
    starts = torch.cat([data.batch(step)[0][:, 0] for step in range(2 * BLOCK // 16)]).numpy()
    ours = starts[starts < 1000]
    assert len(ours) == 2 * BLOCK // 4
    windows, times = np.unique(ours, return_counts=True)
    assert np.array_equal(windows, np.arange(99) * 4)  # (400 - 1) // 4 windows of four tokens
    assert set(times) == {5, 6}  # 512 samples are five epochs of 99, and 17 of the next
    ranks = [DataStream(parts, **settings_, rank=rank, world=4) for rank in range(4)]
    together = torch.cat([rank.batch(77)[1] for rank in ranks])
    assert torch.equal(together, data.batch(77)[1])


def test_bits_per_byte_weigh_the_parts_as_samples_are_drawn() -> None:
    short = tokens_of(np.zeros(10, np.uint8), num_bytes=10)
    long = tokens_of(np.zeros(10, np.uint8), num_bytes=50)
    parts = [Weighted(tokens=short, weight=3.0), Weighted(tokens=long, weight=1.0)]
    assert bytes_per_token(parts) == pytest.approx((3 * 1 + 1 * 5) / 4)
    assert join([short, long]).bytes_per_token == 3.0


def test_a_vocabulary_beyond_the_models_is_refused() -> None:
    parts = [Weighted(tokens=tokens_of(np.zeros(3, np.uint16)))]
    check_vocabulary(parts, 60_000)
    with pytest.raises(DataError, match=r"up to 59999, the model knows 256: set model.vocab_size"):
        check_vocabulary(parts, 256)


def test_parts_of_different_tokenizers_are_refused() -> None:
    """Their numbers would be mixed without a word: both have the same vocabulary."""
    ours, theirs = (
        Tokens(
            [np.zeros(3, np.uint8)], vocab_size=256, num_bytes=3, corpus=name, tokenizer=name * 32
        )
        for name in "ab"
    )
    assert join([ours, ours]).tokenizer == "a" * 32
    with pytest.raises(
        DataError, match=r"the tokenizer of a is a{16}, that of b is b{16}: a token"
    ):
        join([ours, ours, theirs])


def test_a_name_gives_its_parts(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    parts = load_parts(
        f"mix:0.25*{tmp_path}/a.txt,0.75*{tmp_path}/b.txt", "train", cache=tmp_path / "cache"
    )
    assert [(part.weight, part.tokens.tobytes()) for part in parts] == [
        (0.25, b"a" * 90),
        (0.75, b"b" * 90),
    ]


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ("mix:sotu", r"part 'sotu' .* is not understood: write mix:WEIGHT\*CORPUS"),
        ("mix:", "part '' "),
        ("mix:x*sotu", "weight 'x' .* is not a number above 0"),
        ("mix:-1*sotu", "weight '-1' "),
        ("mix:nan*sotu", "weight 'nan' "),
        ("mix:1*mix:1*a", "is not understood"),
    ],
)
def test_a_mixture_that_is_none_is_refused(corpus: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_mixture(corpus)


def test_a_weight_too_small_for_a_block_is_refused() -> None:
    with pytest.raises(DataError, match=r"weight 1 of a mixture is less than 1/1024"):
        shares([5000.0, 1.0])
