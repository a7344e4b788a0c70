"""The stream of batches against its text: nothing twice, nothing lost, any number of ranks.

Run alone: pytest tests/loco/data/test_stream.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loco.data import DataStream, Weighted
from loco.errors import ConfigError, DataError
from loco.tokens import Tokens


def numbered(num_tokens: int, first: int = 0, weight: float = 1.0) -> Weighted:
    """Tokens that tell their own position, from `first` on."""
    tokens = np.arange(first, first + num_tokens, dtype=np.uint16)
    return Weighted(tokens=Tokens([tokens], vocab_size=65536, num_bytes=num_tokens), weight=weight)


def stream(num_tokens: int = 2000, **changes: object) -> DataStream:
    settings: dict = {"seq_len": 7, "batch": 12, "seed": 4, "site": "paris"} | changes
    return DataStream([numbered(num_tokens)], **settings)


@given(
    num_tokens=st.integers(9, 600),
    seq_len=st.integers(2, 8),
    batch=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_no_window_twice_in_an_epoch_and_none_lost(
    num_tokens: int, seq_len: int, batch: int, seed: int
) -> None:
    data = stream(num_tokens, seq_len=seq_len, batch=batch, seed=seed)
    epochs = 3
    steps = -(-epochs * data.num_windows[0] // batch)
    starts = torch.cat([data.batch(step)[0][:, 0] for step in range(steps)]).numpy()
    every_window = np.arange(data.num_windows[0]) * seq_len
    for epoch in np.split(starts[: epochs * data.num_windows[0]], epochs):
        assert np.array_equal(np.sort(epoch), every_window)
    assert data.num_windows[0] * seq_len + seq_len >= num_tokens - 1


def test_targets_are_the_inputs_one_token_later() -> None:
    inputs, targets = stream().batch(3)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (12, 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("world", [1, 2, 3, 12])
def test_the_samples_of_a_site_do_not_depend_on_its_ranks(world: int) -> None:
    ranks = [stream(rank=rank, world=world) for rank in range(world)]
    for step in (0, 5, 10**9):
        together = torch.cat([rank.batch(step)[0] for rank in ranks])
        assert torch.equal(together, stream().batch(step)[0])


def test_a_batch_is_a_function_of_the_step_alone() -> None:
    data = stream()
    fifth = data.batch(5)[0]
    data.batch(6)
    assert torch.equal(data.batch(5)[0], fifth)
    assert torch.equal(stream().batch(5)[0], fifth)
    assert not torch.equal(stream(site="oslo").batch(5)[0], fifth)


def test_ranks_must_divide_the_batch() -> None:
    with pytest.raises(ConfigError, match=r"data\.batch = 12 cannot be split among 5 ranks"):
        stream(rank=0, world=5)


def test_a_text_too_short_for_one_sequence_is_refused() -> None:
    assert stream(8).num_windows == [1]
    with pytest.raises(DataError, match=r"site 'paris' has 7 tokens.*seq_len = 7 needs 8"):
        stream(7)
