"""Scape on 1, 2, 3 and 4 real gloo ranks: proofs (a) to (h) of docs/scape.md.

Compared with the replicated equations in NumPy (oracle.py), with dense AdamS and AdamW, with byte
formulas, with itself after a restart. Sizes divide by nothing.

Alone: python -m pytest tests/loco/inner/test_scape.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import spawn_ranks

from loco.errors import ConfigError
from loco.inner import AdamS, Scape, reshard
from loco.inner.maskwire import wire_bytes
from tests.loco.inner.oracle import Oracle
from tests.loco.inner.ranks import join_ranks

SIZES = ((13, 7), (5,), (11, 3, 2), (), (9, 9), (0, 4))
N = 91 + 5 + 66 + 1 + 81
DECAY = 0.1
RULES = {"local": (0.0, 0.95), "momentum": (0.9, 0.95)}
VARIANTS: list[dict[str, Any]] = [
    {"density": 1.0},
    {"density": 0.2},
    {"density": 0.2, "refresh": 3},
    {"density": 0.2, "delay": 1},
    {"density": 0.2, "delay": 1, "exclude_in_flight": True},
    {"density": 0.2, "delay": 1, "refresh": 4, "exclude_in_flight": True},
    {"density": 0.1, "density_ramp_steps": 8},
    {"density": 0.1, "density_ramp_steps": 8, "delay": 1, "refresh": 2},
    {"density": 0.2, "max_grad_norm": 0.5},
    {"density": 0.001},
]


def make(rule: str, **options: Any) -> tuple[list[torch.Tensor], Scape]:
    """Parameters in two groups that mix sparse and dense ones, and their optimizer."""
    torch.manual_seed(0)
    params = [torch.randn(s).requires_grad_() for s in SIZES]
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    fp32 = {"wire_dtype": torch.float32, "lr": 0.01, "weight_decay": DECAY}
    return params, Scape(groups, betas=RULES[rule], second_moment=rule, **{**fp32, **options})


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In Scape's flat order: sparse tensors, then dense ones, by group."""
    order = [0, 2, 4, 5, 1, 3]
    return torch.cat([tensors[i].detach().reshape(-1) for i in order])


def gradients(step: int, ranks: int) -> np.ndarray:
    """[ranks, N] in flat order; the scale differs between positions as it does in a model."""
    rng = np.random.default_rng(step)
    scale = np.exp(np.random.default_rng(77).normal(size=N))
    return (rng.normal(size=(ranks, N)) * scale).astype(np.float32)


def set_gradients(params: list[torch.Tensor], values: np.ndarray) -> None:
    """Give every parameter its part of `values` [N], through autograd."""
    parts = dict(zip([0, 2, 4, 5, 1, 3], np.split(values, [91, 157, 238, 238, 243]), strict=True))
    for i, p in enumerate(params):
        weights = torch.from_numpy(parts[i].copy()).view(p.shape)
        (p * weights).sum().backward()


def run(params: list[torch.Tensor], opt: Scape, steps: range, rank: int, ranks: int) -> None:
    for step in steps:
        opt.zero_grad()
        set_gradients(params, gradients(step, ranks)[rank])
        opt.step()


def make_oracle(params: list[torch.Tensor], opt: Scape, ranks: int, **options: Any) -> Oracle:
    owner_of, slices = np.full(N, -1), []
    for rank, shard in enumerate(opt._shards):
        for piece in shard.pieces:
            start = piece.flat_start
            for length in piece.slice_lengths():
                owner_of[start : start + length] = rank
                if piece.region.sparse:
                    slices.append(np.arange(start, start + length))
                start += length
    assert (owner_of >= 0).all()
    b1, b2 = RULES[opt.second_moment]
    return Oracle(
        flat(params).numpy().copy(), ranks, owner_of, slices, opt.second_moment, b1, b2,
        weight_decay=DECAY, **options,
    )  # fmt: skip


def require_equal_on_ranks(params: list[torch.Tensor]) -> None:
    """All ranks hold the same bits."""
    if not dist.is_initialized():
        return
    own = flat(params)
    theirs = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, own)
    assert all(torch.equal(t, own) for t in theirs)


def check_oracle(rule: str, options: dict[str, Any], rank: int, ranks: int) -> None:
    """(b) and (h): the equations hold and replicas are bit-equal at every step."""
    params, opt = make(rule, **options)
    oracle = make_oracle(params, opt, ranks, **options)
    for step in range(10):
        before = flat(params)
        run(params, opt, range(step, step + 1), rank, ranks)
        used = opt._mask.marks(N).numpy()
        oracle.step(gradients(step, ranks), 0.01, used)
        np.testing.assert_allclose(flat(params).numpy(), oracle.p, rtol=1e-5, atol=2e-6)
        assert opt.last_grad_norm == pytest.approx(oracle.norm, rel=1e-4)
        require_equal_on_ranks(params)
        off = torch.from_numpy(~used)
        assert torch.equal(flat(params)[off], (before * (1 - 0.01 * DECAY))[off])


def check_dense_limit(rank: int, ranks: int) -> None:
    """(a): at density one Scape is AdamS on the mean gradient, to rounding."""
    params, opt = make("momentum", density=1.0, max_grad_norm=3.0)
    run(params, opt, range(12), rank, ranks)
    torch.manual_seed(0)
    dense = [torch.randn(s).requires_grad_() for s in SIZES]
    adams = AdamS(dense, lr=0.01, weight_decay=DECAY)
    for step in range(12):
        adams.zero_grad()
        set_gradients(dense, gradients(step, ranks).mean(0))
        torch.nn.utils.clip_grad_norm_(dense, 3.0)
        adams.step()
    torch.testing.assert_close(flat(params), flat(dense), rtol=1e-5, atol=2e-6)


def check_conservation(rule: str, wire_dtype: torch.dtype, rank: int, ranks: int) -> None:
    """(c): what is not yet applied plus what was sent is all that the ranks accumulated."""
    weight = 1 - RULES[rule][0]
    params, opt = make(rule, density=0.2, wire_dtype=wire_dtype)
    for step in range(12):
        before = whole_state(opt, rank, decayed=True)
        run(params, opt, range(step, step + 1), rank, ranks)
        expected = before + weight * torch.from_numpy(gradients(step, ranks).mean(0))
        torch.testing.assert_close(whole_state(opt, rank), expected, rtol=1e-5, atol=1e-5)


def whole_state(opt: Scape, rank: int, decayed: bool = False) -> torch.Tensor:
    """`m + h + mean q`, with b1 m for m if `decayed`, [N]. In `local` m is what was just sent."""
    owner = torch.zeros(N)
    if opt.second_moment == "momentum":
        carry = opt._owner._decayed() if decayed else opt._owner.buffer
        opt._shard.put(owner, carry)
    elif not decayed:
        sent = torch.zeros(opt._shard.length)
        sent[opt._owner.support] = opt._owner._gradient
        opt._shard.put(owner, sent)
    total = owner + opt._residual / opt.group.size
    if opt.group.size > 1:
        dist.all_reduce(total)
    return total


def check_bytes(wire_dtype: torch.dtype, refresh: int, rank: int, ranks: int) -> None:
    """(d): bytes counted at the collectives equal the formula, exactly."""
    params, opt = make("local", density=0.1, refresh=refresh, wire_dtype=wire_dtype)
    built = opt.bytes_sent
    run(params, opt, range(6), rank, ranks)
    kept = [s.num_kept(0.1) + s.length - s.sparse_length for s in opt._shards]
    size = torch.empty(0, dtype=wire_dtype).element_size()
    values = (sum(kept) - kept[rank]) * size
    directions = max(kept) * size * (ranks - 1)
    codes = max(wire_bytes(s.sparse_length, s.num_kept(0.1)) for s in opt._shards) * (ranks - 1)
    norm = 2 * 4 * (ranks - 1) // ranks
    expected = 6 * (values + directions + norm) + 6 // refresh * codes
    assert opt.bytes_sent - built == (expected if ranks > 1 else 0)


def check_average(rank: int, ranks: int) -> None:
    """(e): every rank counts. Opposite gradients give no step, a lone one gives its share."""
    for rule in RULES:
        params, opt = make(rule, density=1.0, weight_decay=0.0)
        before = flat(params)
        g = gradients(0, ranks)
        g[0] = -g[1:].sum(0)
        for _ in range(3):
            opt.zero_grad()
            set_gradients(params, g[rank])
            opt.step()
        # Sums cancel up to rounding, which AdamS would blow up: judge what was averaged.
        assert opt.last_grad_norm < 1e-5
        params, opt = make(rule, density=1.0, eps=1e3, bias_correction=False)
        opt.zero_grad()
        set_gradients(params, gradients(0, ranks)[rank] * (rank == ranks - 1))
        opt.step()
        step = (before * (1 - 0.01 * DECAY) - flat(params)) * 1e3 / 0.01
        share = gradients(0, ranks)[-1] / ranks * (1 - RULES[rule][0])
        np.testing.assert_allclose(step.numpy(), share, rtol=0.05, atol=0.02)


def check_resume(rule: str, options: dict[str, Any], rank: int, ranks: int) -> None:
    """(g): a restart between any two steps changes no bit, masks and residuals included."""
    straight, opt = make(rule, **options)
    run(straight, opt, range(9), rank, ranks)
    first, before = make(rule, **options)
    run(first, before, range(5), rank, ranks)
    saved = before.state_dict()
    second, after = make(rule, **{**options, "lr": 0.5})
    for p, q in zip(second, first, strict=True):
        p.data.copy_(q.data)
    after.load_state_dict(saved)
    run(second, after, range(5, 9), rank, ranks)
    assert torch.equal(flat(straight), flat(second))
    assert torch.equal(opt._residual, after._residual)


def check_nan_on_one_rank(rank: int, ranks: int) -> None:
    """All ranks skip together, nothing of the step remains, even where the NaN is off the mask."""
    for options in (VARIANTS[1], VARIANTS[4]):
        for bad in (float("nan"), float("-inf")):
            params, opt = make("local", **options)
            other, control = make("local", **options)
            run(params, opt, range(3), rank, ranks)
            run(other, control, range(3), rank, ranks)
            for position in (0, 90, N - 1):
                opt.zero_grad()
                values = gradients(50, ranks)[rank]
                if rank == ranks - 1:
                    values[position] = bad
                set_gradients(params, values)
                opt.step()
            assert opt.skipped_steps == 3
            assert not np.isfinite(opt.last_grad_norm)
            run(params, opt, range(3, 6), rank, ranks)
            run(other, control, range(3, 6), rank, ranks)
            assert torch.equal(flat(params), flat(other))
            assert control.skipped_steps == 0


def check_unused_and_accumulated(rank: int, ranks: int) -> None:
    """A parameter unused on one rank counts as zero there; micro-batches add up."""
    params, opt = make("local", density=0.3)
    other, control = make("local", density=0.3)
    for step in range(4):
        g = gradients(step, ranks)
        g[0, :91] = 0.0
        opt.zero_grad()
        for p in params:
            p.grad = None  # as model.zero_grad() does
        if rank == 0:
            zeroed = [p.detach().clone().requires_grad_() for p in params]
            set_gradients(zeroed, g[0])
            for p, z in list(zip(params, zeroed, strict=True))[1:]:
                p.grad = z.grad
        else:
            set_gradients(params, g[rank])
        opt.step()
        control.zero_grad()
        set_gradients(other, g[rank] * 0.25)
        set_gradients(other, g[rank] * 0.75)
        control.step()
    torch.testing.assert_close(flat(params), flat(other), rtol=1e-4, atol=1e-5)


def check_refusals(rank: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"rank 0 has density=0.2, rank 1 has density=0.3"):
        make("local", density=0.3 if rank == 1 else 0.2)
    wide = 8 if rank == 1 else 7
    named = [("wte", torch.zeros(3, 3)), ("head", torch.zeros(wide, 2))]
    named = [(name, p.requires_grad_()) for name, p in named]
    with pytest.raises(ConfigError, match=r"rank 0 has head \(7, 2\).*rank 1 has head \(8, 2\)"):
        Scape(named, lr=0.1)


def check_all(rank: int, ranks: int, folder: str) -> None:
    with join_ranks(rank, ranks, folder):
        check_everything(rank, ranks)
        check_reshard(rank, ranks)
        if ranks > 1:
            check_average(rank, ranks)
            check_refusals(rank, ranks)


def check_everything(rank: int, ranks: int) -> None:
    for rule in RULES:
        # One and three ranks run all variants, two and four some.
        for options in {2: VARIANTS[::2], 4: VARIANTS[1::4]}.get(ranks, VARIANTS):
            check_oracle(rule, options, rank, ranks)
        for options in (VARIANTS[5], VARIANTS[7]):
            check_resume(rule, {**options, "wire_dtype": torch.bfloat16}, rank, ranks)
        for wire_dtype in (torch.float32, torch.bfloat16):
            check_conservation(rule, wire_dtype, rank, ranks)
    for wire_dtype in (torch.float32, torch.bfloat16):
        for refresh in (1, 3):
            check_bytes(wire_dtype, refresh, rank, ranks)
    check_dense_limit(rank, ranks)
    check_nan_on_one_rank(rank, ranks)
    check_unused_and_accumulated(rank, ranks)


def check_reshard(rank: int, ranks: int) -> None:
    """With another number of ranks: nothing accumulated is lost, owners keep their buffers."""
    for rule in RULES:
        params, opt = make(rule, density=0.2, delay=1, refresh=3)
        run(params, opt, range(5), rank, ranks)
        states: list[Any] = [None] * ranks
        dist.all_gather_object(states, opt.state_dict())
        assert reshard(states, rank=rank, size=ranks) is states[rank]
        for size in (1, 2, 5):
            fitted = [reshard(states, rank=r, size=size) for r in range(size)]
            mean = sum(s["state"]["residual"] for s in states) / ranks
            refitted = sum(s["state"]["residual"] for s in fitted) / size
            torch.testing.assert_close(refitted, mean, rtol=1e-5, atol=1e-6)
            back = reshard(fitted, rank=rank, size=ranks)
            assert torch.equal(back["state"]["owner"], states[rank]["state"]["owner"])
        alone, single = make(rule, density=0.2, delay=1, refresh=3, group=alone_group(rank, ranks))
        for p, q in zip(alone, params, strict=True):
            p.data.copy_(q.data)
        single.load_state_dict(reshard(states, rank=0, size=1))
        run(alone, single, range(5, 8), 0, 1)
        assert single.applied_steps == 8
        assert torch.isfinite(flat(alone)).all()


def alone_group(rank: int, ranks: int) -> dist.ProcessGroup:
    """A group of this rank only."""
    groups = [dist.new_group([r]) for r in range(ranks)]
    return groups[rank]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_on_ranks(ranks: int, tmp_path: Path) -> None:
    spawn_ranks(check_all, (ranks, str(tmp_path)), ranks)


def test_alone() -> None:
    check_everything(0, 1)


def test_alone_with_the_local_second_moment_is_rmsprop_at_density_one() -> None:
    """(a) for the rule of the default preset: AdamW with b1 = 0."""
    params, opt = make("local", density=1.0)
    run(params, opt, range(12), 0, 1)
    torch.manual_seed(0)
    dense = [torch.randn(s).requires_grad_() for s in SIZES]
    adamw = torch.optim.AdamW(dense, lr=0.01, betas=(0.0, 0.95), weight_decay=DECAY)
    for step in range(12):
        adamw.zero_grad()
        set_gradients(dense, gradients(step, 1)[0])
        adamw.step()
    torch.testing.assert_close(flat(params), flat(dense), rtol=1e-5, atol=2e-6)
