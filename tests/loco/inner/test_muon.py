"""Muon against torch.optim.Muon and AdamW, its directions against NumPy's SVD, and a run resumed.

Alone: python -m pytest tests/loco/inner/test_muon.py
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loco.config import InnerConfig, ModelConfig
from loco.inner.build import build_inner
from loco.inner.groups import Group
from loco.inner.muon import Muon, hidden_matrices, orthogonal
from loco.model import build_model
from worker.structure import pack_structure, unpack_structure

SHAPES = ((6, 4), (4, 6), (6, 4))
VECTOR = 5


def fresh() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape)) for shape in (*SHAPES, (VECTOR,))]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape)


def muon(params: list[nn.Parameter]) -> Muon:
    vectors = {"params": params[-1:], "weight_decay": 0.0}
    return Muon(params[:-1], [vectors], lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))


def test_it_steps_as_torchs_muon_and_adamw_do() -> None:
    ours, theirs = fresh(), fresh()
    optimizer = muon(ours)
    matrices = torch.optim.Muon(
        theirs[:-1], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    vectors = torch.optim.AdamW(theirs[-1:], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(8):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        matrices.step()
        vectors.step()
    torch.testing.assert_close(ours[-1], theirs[-1])
    for mine, other, start in zip(ours[:-1], theirs[:-1], fresh(), strict=False):
        moved = (other - start).norm()
        assert (mine - other).norm() < 0.02 * moved  # torch's is bf16 inside


@given(
    rows=st.integers(1, 12), columns=st.integers(1, 12), num=st.integers(1, 3),
    scale=st.sampled_from([1e-4, 1.0, 1e4]), seed=st.integers(0, 99),
)  # fmt: skip
def test_directions_keep_singular_vectors_and_lose_their_values(
    rows: int, columns: int, num: int, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    matrices = scale * rng.standard_normal((num, rows, columns)).astype(np.float32)
    found = orthogonal(torch.from_numpy(matrices)).numpy()
    assert found.shape == matrices.shape
    for before, after in zip(matrices, found, strict=True):
        u, values, vt = np.linalg.svd(before, full_matrices=False)
        core = u.T @ after @ vt.T  # diagonal: nothing has turned
        np.testing.assert_allclose(core, np.diag(np.diag(core)), atol=2e-3)
        large = values > 0.02 * np.linalg.norm(values)  # five steps lift smaller ones in part
        assert np.all((np.diag(core)[large] > 0.6) & (np.diag(core)[large] < 1.3))


def test_a_matrix_without_gradient_or_with_zeros_stays_finite() -> None:
    assert torch.equal(orthogonal(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))
    params = fresh()
    give_gradients(params, 0)
    params[0].grad, before = None, params[0].clone()
    muon(params).step()
    assert torch.equal(params[0], before)
    assert all(bool(p.isfinite().all()) for p in params)


def test_the_state_of_a_checkpoint_goes_on_bit_for_bit() -> None:
    straight, resumed = fresh(), fresh()
    optimizer = muon(straight)
    first = muon(resumed)
    for step in range(3):
        for params, each in ((straight, optimizer), (resumed, first)):
            give_gradients(params, step)
            each.step()
    second = muon(resumed)
    structure, saved = pack_structure(first.state_dict())
    state, tensors = unpack_structure(json.loads(json.dumps(structure)))
    for tensor, value in zip(tensors, saved, strict=True):
        tensor.copy_(value)
    second.load_state_dict(state)
    for group in (*optimizer.param_groups, *second.param_groups):
        group["lr"] = 0.01  # what a schedule sets reaches both kinds
    for params, each in ((straight, optimizer), (resumed, second)):
        give_gradients(params, 3)
        each.step()
    assert all(map(torch.equal, straight, resumed))
    assert not torch.equal(straight[-1], fresh()[-1])


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_head_and_norms_have_adamw(tied: bool) -> None:
    # As wide as the vocabulary: shapes alone would not tell a projection from the head.
    config = ModelConfig(
        vocab_size=32, dim=32, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=48,
        tie_embeddings=tied,
    )  # fmt: skip
    model = build_model(config, seed=0)
    hidden = hidden_matrices(model)
    names = {name for name, p in model.named_parameters() if p in hidden}
    assert len(names) == 7
    assert all(name.startswith("layers.0.") for name in names)
    inner = build_inner(InnerConfig(optimizer="muon"), model, Group())
    kinds = [group["muon"] for group in inner.param_groups]
    assert kinds == [True, False, False]
    sizes = [sum(p.numel() for p in group["params"]) for group in inner.param_groups]
    assert sizes[0] == sum(p.numel() for p in hidden)
    assert sum(sizes) == sum(p.numel() for p in model.parameters())
