"""AdamS against a NumPy oracle of arXiv 2505.16363, both forms; bad arguments and gradients.

Alone: python -m pytest tests/loco/inner/test_adams.py
"""

from typing import Any

import numpy as np
import pytest
import torch

from loco.errors import ConfigError
from loco.inner import AdamS


def oracle(
    p: np.ndarray,
    grads: list[np.ndarray],
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    wd: float,
    corrected: bool,
) -> np.ndarray:
    """The equations of the module docstring, one line each, in float64."""
    m = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        v = b2 * m**2 + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * g
        bc1, bc2 = (1 - b1**t, 1 - b2**t) if corrected else (1.0, 1.0)
        p = p * (1 - lr * wd) - lr * (m / bc1) / (np.sqrt(v / bc2) + eps)
    return p


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("eps", [1e-8, 0.3])
def test_matches_the_paper(corrected: bool, eps: float) -> None:
    rng = np.random.default_rng(3)
    shapes = [(7, 5), (11,), ()]
    starts = [rng.normal(size=s) for s in shapes]
    grads = [[rng.normal(size=s) for _ in range(25)] for s in shapes]
    params = [torch.tensor(s, dtype=torch.float32, requires_grad=True) for s in starts]
    opt = AdamS(
        params, lr=0.02, betas=(0.8, 0.95), eps=eps, weight_decay=0.1, bias_correction=corrected
    )
    for t in range(25):
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g[t], dtype=torch.float32)
        opt.step()
    for p, start, g in zip(params, starts, grads, strict=True):
        expected = oracle(start, g, 0.02, 0.8, 0.95, eps, 0.1, corrected)
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=2e-5, atol=2e-6)


def test_first_step_moves_by_lr_and_zero_gradients_keep_moving() -> None:
    p = torch.zeros(3, requires_grad=True)
    opt = AdamS([p], lr=0.5)
    p.grad = torch.tensor([1e-3, -4.0, 0.0])
    opt.step()
    torch.testing.assert_close(p.detach(), torch.tensor([-0.5, 0.5, 0.0]), rtol=1e-4, atol=0)
    opt.param_groups[0]["bias_correction"] = False
    for _ in range(50):
        p.grad = torch.zeros(3)
        before = p.detach().clone()
        opt.step()
    moved = (p.detach() - before)[1] / 0.5
    assert moved == pytest.approx(0.9 / 0.95**0.5, rel=1e-3)


def test_a_parameter_that_joins_later_has_its_own_bias_correction() -> None:
    late, early = (torch.zeros(1, requires_grad=True) for _ in range(2))
    opt = AdamS([early, late], lr=0.1)
    early.grad = torch.ones(1)
    for _ in range(5):
        opt.step()
    late.grad = torch.ones(1)
    opt.step()
    assert late.item() == pytest.approx(-0.1, rel=1e-5)


def test_resume_is_bit_equal() -> None:
    torch.manual_seed(0)
    grads = torch.randn(6, 9)

    def train(p: torch.Tensor, opt: AdamS, rows: torch.Tensor) -> None:
        for g in rows:
            p.grad = g.clone()
            opt.step()

    straight = torch.ones(9, requires_grad=True)
    train(straight, AdamS([straight], lr=0.1), grads)
    resumed = torch.ones(9, requires_grad=True)
    first = AdamS([resumed], lr=0.1)
    train(resumed, first, grads[:3])
    second = AdamS([resumed], lr=0.7)
    second.load_state_dict(first.state_dict())
    train(resumed, second, grads[3:])
    assert torch.equal(straight, resumed)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"lr": -1.0}, "lr is -1.0; it must be >= 0"),
        ({"lr": 1.0, "betas": (1.0, 0.9)}, r"betas\[0\] is 1.0"),
        ({"lr": 1.0, "betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
        ({"lr": 1.0, "eps": 0.0}, "eps is 0.0; it must be > 0"),
        ({"lr": 1.0, "weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"lr": float("nan")}, "lr is nan"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        AdamS([torch.zeros(2, requires_grad=True)], **arguments)


def test_sparse_gradient_is_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    opt = AdamS(table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse_coo"):
        opt.step()
