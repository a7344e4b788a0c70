"""Scape in one process: what is refused, unusual parameters, and orderings (f) of docs/scape.md.

Alone: python -m pytest tests/loco/inner/test_scape_alone.py
"""

from typing import Any

import pytest
import torch

from loco.errors import ConfigError
from loco.inner import Scape, preset, reshard


def one(*shape: int) -> torch.Tensor:
    return torch.ones(shape).requires_grad_()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"density": 0.0}, r"density is 0.0; it must be in \(0, 1\]"),
        ({"density": 1.1}, r"density is 1.1; it must be in \(0, 1\]"),
        ({"density": float("nan")}, r"density is nan; it must be in \(0, 1\]"),
        ({"refresh": 0}, "refresh is 0; it must be >= 1"),
        ({"delay": 2}, "delay is 2; it must be 0 or 1"),
        ({"density_ramp_steps": -1}, "density_ramp_steps is -1; it must be >= 0"),
        ({"wire_dtype": torch.float16}, r"wire_dtype is torch\.float16; it must be torch\.float32"),
        ({"second_moment": "adam"}, "second_moment is 'adam'; it must be 'local' or 'momentum'"),
        ({"max_grad_norm": -1.0}, r"max_grad_norm is -1\.0; it must be > 0"),
        ({"betas": (0.9, 0.95)}, r"betas\[0\] is 0\.9 with second_moment 'local'; it must be 0"),
        ({"exclude_in_flight": True}, "exclude_in_flight is True with delay 0, where nothing is"),
        ({"lr": -0.1}, r"lr is -0\.1; it must be >= 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Scape([one(4, 4)], **{"lr": 0.1, **options})


def test_parameters_that_share_memory_are_refused_and_ties_are_one() -> None:
    base = torch.ones(4, 4)
    with pytest.raises(ConfigError, match="a and b are two parameters that share memory"):
        Scape([("a", base.requires_grad_()), ("b", base.detach()[2:].requires_grad_())], lr=0.1)
    embed, head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
    head.weight = embed.weight
    model = torch.nn.Sequential(embed, head)
    opt = Scape(model.parameters(), lr=0.1, density=0.5)
    model(torch.tensor([1, 2])).sum().backward()
    opt.step()
    assert head.weight is embed.weight
    assert head.weight.data_ptr() == embed.weight.data_ptr()


def test_frozen_parameters_stay_and_other_dtypes_are_refused() -> None:
    frozen, free = torch.ones(4, 4), one(4, 4)
    opt = Scape([frozen, free], lr=0.1, weight_decay=0.1, density=0.5)
    (frozen * free).sum().backward()
    opt.step()
    assert torch.equal(frozen, torch.ones(4, 4))
    assert not torch.equal(free, torch.ones(4, 4))
    for dtype in (torch.bfloat16, torch.complex64):
        with pytest.raises(ConfigError, match=f"has dtype {dtype}; the inner optimizers need"):
            Scape([torch.ones(2, 2, dtype=dtype, requires_grad=True)], lr=0.1)
    with pytest.raises(ConfigError, match="others are on cpu; put the whole model on one device"):
        Scape([one(2, 2), torch.ones(2, 2, device="meta", requires_grad=True)], lr=0.1)


def test_sparse_gradients_are_refused_by_name() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    opt = Scape(table.named_parameters(), lr=0.1)
    table.zero_grad()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match=r"gradient of weight has layout torch\.sparse_coo"):
        opt.step()


def test_a_replaced_storage_is_noticed_and_written_values_are_not() -> None:
    layer = torch.nn.Linear(4, 4)
    opt = Scape(layer.named_parameters(), lr=0.1)
    with torch.no_grad():
        layer.weight.copy_(torch.zeros(4, 4))  # as an outer round does
    layer(torch.ones(4)).sum().backward()
    opt.step()
    assert layer.weight.abs().max() > 0
    layer.weight.data = torch.ones(4, 4)
    with pytest.raises(ConfigError, match="storage of weight was replaced"):
        opt.step()


def test_groups_are_fixed_once_built() -> None:
    opt = Scape([one(4, 4)], lr=0.1)
    with pytest.raises(ConfigError, match="cannot take another parameter group"):
        opt.add_param_group({"params": [one(2, 2)]})


def test_lr_and_weight_decay_are_by_group_and_follow_what_is_set() -> None:
    decayed, plain = one(3, 3), one(5)
    groups = [{"params": [decayed], "weight_decay": 0.5}, {"params": [plain], "lr": 0.2}]
    opt = Scape(groups, lr=0.1, density=1.0, wire_dtype=torch.float32)
    (decayed.sum() + plain.sum()).backward()
    opt.param_groups[0]["lr"] = 0.4
    opt.step()
    torch.testing.assert_close(decayed.detach(), torch.full((3, 3), 1 - 0.4 * 0.5 - 0.4))
    torch.testing.assert_close(plain.detach(), torch.full((5,), 1 - 0.2))


def test_a_step_that_is_given_up_leaves_no_trace() -> None:
    def start() -> tuple[torch.Tensor, Scape]:
        w = one(6, 6)
        return w, Scape([w], lr=0.1, density=0.2)

    def backward(w: torch.Tensor, seed: int) -> None:
        torch.manual_seed(seed)
        (w * torch.randn(6, 6)).sum().backward()

    (w, opt), (other, control) = start(), start()
    for seed in range(4):
        opt.zero_grad()
        backward(w, seed + 100)
        opt.stage()  # and no commit: the ranks voted against it
        opt.zero_grad()
        control.zero_grad()
        backward(w, seed)
        backward(other, seed)
        opt.step()
        control.step()
    assert torch.equal(w, other)


def test_a_state_of_something_else_is_refused() -> None:
    opt = Scape([one(4, 4)], lr=0.1)
    saved = opt.state_dict()
    elsewhere = {**saved, "state": {**saved["state"], "size": 3, "rank": 0}}
    with pytest.raises(ConfigError, match="saved with sizes_by_group"):
        Scape([one(4, 5)], lr=0.1).load_state_dict(saved)
    with pytest.raises(ConfigError, match="saved with second_moment = local"):
        Scape([one(4, 4)], lr=0.1, **preset("paper", total_steps=10)).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"saved with size = 3, here it is 1.*reshard"):
        opt.load_state_dict(elsewhere)
    with pytest.raises(ConfigError, match=r"states of ranks \[0\], the site had 3 ranks"):
        reshard([elsewhere], rank=0, size=1)


def test_presets_are_accepted_and_default_is_the_default() -> None:
    for name in ("default", "paper"):
        Scape([one(4, 4)], lr=0.1, **preset(name, total_steps=200))
    assert preset("paper", total_steps=200)["density_ramp_steps"] == 20
    plain, named = (
        Scape([one(4, 4)], lr=0.1, **options) for options in ({}, preset("default", total_steps=9))
    )
    same = ("betas", "second_moment", "refresh", "delay", "wire_dtype", "density_ramp_steps")
    assert all(getattr(plain, name) == getattr(named, name) for name in same)


def test_a_row_that_its_owner_forgot_cannot_make_a_giant_step() -> None:
    """v decays while nothing is seen; the first gradient afterwards meets a tiny denominator."""
    w = torch.zeros(4, 4, requires_grad=True)
    opt = Scape([w], lr=1.0, density=1.0, wire_dtype=torch.float32)
    opt.zero_grad()
    (w * 1e-6).sum().backward()
    opt.step()
    before = w.detach().clone()
    opt._owner.buffer.zero_()
    opt.zero_grad()
    opt._residual.fill_(1.0)  # what other ranks had sent in the meantime
    opt.step()
    assert (w.detach() - before).abs().max() <= 0.05**-0.5 + 1e-6


def regress(rule: str, lr: float, change: str) -> float:
    """Squared distance from the solution after 300 steps of a noisy least-squares problem."""
    torch.manual_seed(3)
    target = torch.randn(24, 24) * torch.exp(torch.randn(24, 24))
    w = torch.zeros(24, 24, requires_grad=True)
    betas = (0.0 if rule == "local" else 0.9, 0.95)
    opt = Scape([w], lr=lr, betas=betas, second_moment=rule, density=0.05)
    if change == "random masks":
        opt._owner.scores = torch.rand_like  # type: ignore[method-assign, assignment]
    for step in range(300):
        x = torch.randn(64, 24)
        opt.param_groups[0]["lr"] = lr * (1 - step / 300)
        opt.zero_grad()
        ((x @ (w - target) + 0.5 * torch.randn(64, 24)) ** 2).mean().backward()
        opt.step()
        if change == "no feedback":
            opt._residual.zero_()
            if rule == "momentum":
                kept = torch.zeros_like(opt._owner.buffer)
                kept[opt._owner.support] = opt._owner.buffer[opt._owner.support]
                opt._owner.buffer.copy_(kept)
    return float(((w.detach() - target) ** 2).mean())


@pytest.mark.parametrize("rule", ["local", "momentum"])
def test_tuned_feedback_beats_none_and_magnitude_beats_chance(rule: str) -> None:
    best = {
        change: min(regress(rule, lr, change) for lr in (0.3, 1.0))
        for change in ("none", "no feedback", "random masks")
    }
    assert best["none"] < 0.8 * best["no feedback"]
    assert best["none"] < 0.1 * best["random masks"]
