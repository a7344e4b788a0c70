"""Held-out windows and the loss over them, against direct sums; ranks share the work exactly.

Run alone: pytest tests/loco/data/test_validation.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loco.config import ModelConfig
from loco.data import bits_per_byte, evaluate, validation_windows
from loco.errors import DataError
from loco.model import build_model

CONFIG = ModelConfig(
    vocab_size=50, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32, seq_len=9
)


def test_windows_are_spread_evenly_and_do_not_overlap() -> None:
    windows = validation_windows(np.arange(1001, dtype=np.uint16), seq_len=10, count=8)
    assert windows.shape == (8, 11)
    starts = windows[:, 0].numpy()
    assert starts[0] == 0
    assert set(np.diff(starts)) <= {120, 130}
    assert torch.equal(windows[:, -1], windows[:, 0] + 10)


def test_a_short_text_gives_fewer_windows_and_none_gives_an_error() -> None:
    assert validation_windows(np.arange(31, dtype=np.uint8), seq_len=10, count=8).shape == (3, 11)
    with pytest.raises(DataError, match="10 tokens, too few for one sequence"):
        validation_windows(np.arange(10, dtype=np.uint8), seq_len=10, count=8)


def test_the_sums_of_all_ranks_are_the_loss_of_the_whole() -> None:
    model = build_model(CONFIG, seed=0)
    windows = torch.arange(11 * 10).reshape(11, 10) % 50
    nats, num_bytes = evaluate(model, windows, batch=4)
    assert num_bytes == 11 * 9
    assert nats == pytest.approx(99 * model(windows[:, :-1], windows[:, 1:]).item(), rel=1e-6)
    parts = [evaluate(model, windows[rank::3]) for rank in range(3)]
    assert sum(part[0] for part in parts) == pytest.approx(nats, rel=1e-6)
    assert sum(part[1] for part in parts) == num_bytes


def test_a_rank_without_windows_adds_nothing() -> None:
    windows = torch.zeros(1, 10, dtype=torch.int64)
    assert evaluate(build_model(CONFIG, seed=0), windows[1::2]) == (0.0, 0)


def test_evaluation_leaves_the_mode_and_the_gradients_alone() -> None:
    class Watched(nn.Module):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            assert tokens.shape == targets.shape
            assert not self.training
            assert not torch.is_grad_enabled()
            return torch.tensor(1.0)

    model = Watched()
    assert evaluate(model, torch.zeros(3, 5, dtype=torch.int64)) == (12.0, 12)
    assert model.training


def test_a_uniform_guess_over_bytes_costs_eight_bits() -> None:
    assert bits_per_byte(100 * np.log(256), 100) == pytest.approx(8.0)
