"""DenseSync on 1 and 3 gloo ranks against one process that sees all gradients.

Alone: python -m pytest tests/loco/inner/test_dense.py
"""

from pathlib import Path

import pytest
import torch
from support.ranks import spawn_ranks

from loco.errors import ConfigError
from loco.inner import AdamS, DenseSync
from tests.loco.inner.ranks import join_ranks

SIZES = ((3, 5), (7,), ())
STEPS = 8


def fresh() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(s).requires_grad_() for s in SIZES]


def gradient(step: int, rank: int, parameter: int) -> torch.Tensor:
    torch.manual_seed(1000 * step + 10 * rank + parameter)
    return torch.randn(SIZES[parameter])


def expected(ranks: int, max_grad_norm: float | None) -> list[torch.Tensor]:
    params = fresh()
    opt = AdamS(params, lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = sum(gradient(step, r, i) for r in range(ranks)) / ranks
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, max_grad_norm)
        opt.step()
    return params


def train(ranks: int, rank: int, max_grad_norm: float | None) -> tuple[list, DenseSync]:
    params = fresh()
    opt = DenseSync(AdamS(params, lr=0.01, weight_decay=0.1), max_grad_norm=max_grad_norm)
    for step in range(STEPS):
        opt.zero_grad()
        for i, p in enumerate(params):  # two micro-batches
            (p * gradient(step, rank, i) / 2).sum().backward()
            (p * gradient(step, rank, i) / 2).sum().backward()
        opt.step()
    return params, opt


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_alone_equals_the_optimizer(max_grad_norm: float | None) -> None:
    params, opt = train(1, 0, max_grad_norm)
    for p, e in zip(params, expected(1, max_grad_norm), strict=True):
        torch.testing.assert_close(p, e, rtol=1e-6, atol=1e-7)
    assert opt.bytes_sent == 0


def check_on_ranks(rank: int, ranks: int, folder: str) -> None:
    with join_ranks(rank, ranks, folder):
        check_training(rank, ranks)
        check_nan_on_one_rank(rank)
        check_different_models(rank)


def check_training(rank: int, ranks: int) -> None:
    for max_grad_norm in (None, 0.5):
        params, opt = train(ranks, rank, max_grad_norm)
        for p, e in zip(params, expected(ranks, max_grad_norm), strict=True):
            torch.testing.assert_close(p, e, rtol=1e-5, atol=1e-6)
        # A ring all-reduce: 2 (N-1)/N of 23 fp32 values, and once the lines of the model.
        per_step = 2 * 23 * 4 * (ranks - 1) // ranks
        described = opt.bytes_sent - STEPS * per_step
        assert 0 < described < 400 * ranks


def check_nan_on_one_rank(rank: int) -> None:
    params = fresh()
    opt = DenseSync(AdamS(params, lr=0.01))
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    if rank == 1:
        params[0].grad[1, 1] = float("nan")
    opt.step()
    assert opt.skipped_steps == 1
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    opt.zero_grad()
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert opt.skipped_steps == 1
    assert not torch.equal(params[0], before[0])


def check_different_models(rank: int) -> None:
    params = fresh()
    if rank == 1:
        params[1] = torch.zeros(8, requires_grad=True)
    with pytest.raises(ConfigError, match=r"rank 0 has .*parameter 1 \(7,\).*rank 1 has .*\(8,\)"):
        DenseSync(torch.optim.SGD(params, lr=0.1))


def test_three_ranks(tmp_path: Path) -> None:
    spawn_ranks(check_on_ranks, (3, str(tmp_path)), 3)


def test_a_gradient_that_was_set_to_none_counts_as_zero() -> None:
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    opt = DenseSync(torch.optim.SGD([used, unused], lr=1.0))
    (used + unused).sum().backward()
    used.grad = unused.grad = None  # as model.zero_grad() does
    (3 * used).sum().backward()
    opt.step()
    assert used.tolist() == [-2.0, -2.0]
    assert unused.tolist() == [1.0, 1.0]


def test_frozen_parameters_stay() -> None:
    free, frozen = torch.ones(2, requires_grad=True), torch.ones(2)
    opt = DenseSync(torch.optim.SGD([free, frozen], lr=1.0, weight_decay=0.1))
    (free * frozen).sum().backward()
    opt.step()
    assert frozen.tolist() == [1.0, 1.0]
    assert free.tolist() != [1.0, 1.0]


def test_what_cannot_be_averaged_is_refused() -> None:
    half = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ConfigError, match=r"bfloat16; the inner optimizers need torch.float32"):
        DenseSync(torch.optim.SGD([half], lr=0.1))
    complex_ = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(ConfigError, match="complex64"):
        DenseSync(torch.optim.SGD([complex_], lr=0.1))
    with pytest.raises(ConfigError, match="no parameter requires a gradient"):
        DenseSync(torch.optim.SGD([torch.zeros(2)], lr=0.1))
    fine = torch.zeros(2, requires_grad=True)
    with pytest.raises(ConfigError, match=r"max_grad_norm is 0.0; it must be > 0"):
        DenseSync(torch.optim.SGD([fine], lr=0.1), max_grad_norm=0.0)


def test_sparse_gradients_are_refused_by_name() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    opt = DenseSync(torch.optim.SGD(list(table.named_parameters()), lr=0.1))
    table.zero_grad()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"gradient of weight has layout torch.sparse_coo"):
        opt.step()
