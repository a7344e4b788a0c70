"""The Llama against a plain NumPy forward pass, and its initialisation.

Run alone: pytest tests/loco/model/test_llama.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from loco.config import ModelConfig
from loco.model import Llama, build_model, layout_of, pack, unpack
from loco.model.llama import NORM_EPS

SMALL = {"vocab_size": 31, "dim": 24, "num_layers": 2, "ffn_dim": 40, "seq_len": 16}
SHAPES = [
    ModelConfig(**SMALL, num_heads=2, num_kv_heads=2, tie_embeddings=True),
    ModelConfig(**SMALL, num_heads=6, num_kv_heads=2, tie_embeddings=False),
    ModelConfig(**SMALL, num_heads=4, num_kv_heads=1, tie_embeddings=False, rope_theta=500.0),
]


def scrambled(config: ModelConfig) -> Llama:
    """A model whose every parameter matters, norms included."""
    model = build_model(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("config", SHAPES)
def test_logits_equal_the_numpy_oracle(config: ModelConfig) -> None:
    model = scrambled(config)
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, (2, 11))
    got = model(torch.from_numpy(tokens)).detach().numpy()
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    for row, expected_tokens in zip(got, tokens, strict=True):
        np.testing.assert_allclose(row, oracle(config, weights, expected_tokens), atol=2e-5)


def test_loss_is_the_mean_cross_entropy_in_nats() -> None:
    model = scrambled(SHAPES[1])
    tokens = torch.arange(12).reshape(2, 6)
    logits = model(tokens[:, :-1]).detach().double().numpy()
    picked = np.take_along_axis(logits, tokens[:, 1:, None].numpy(), axis=-1)[..., 0]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - picked)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_token_sees_only_itself_and_the_past() -> None:
    model = scrambled(SHAPES[1])
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6] = 30
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:6], after[:6])
    assert not torch.allclose(before[6:], after[6:])


def test_initialisation_is_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = flat(build_model(SHAPES[1], seed=7))
    assert torch.equal(torch.get_rng_state(), state), "the global random state was advanced"
    torch.manual_seed(6)
    assert torch.equal(flat(build_model(SHAPES[1], seed=7)), first)
    assert not torch.equal(flat(build_model(SHAPES[1], seed=8)), first)


@pytest.mark.parametrize("config", SHAPES)
def test_initial_loss_is_close_to_that_of_a_uniform_guess(config: ModelConfig) -> None:
    tokens = torch.arange(16)[None]
    loss = build_model(config, seed=0)(tokens, tokens.flip(1))
    assert loss.item() == pytest.approx(np.log(config.vocab_size), rel=0.15)


def test_bfloat16_keeps_fp32_parameters_gradients_and_logits() -> None:
    exact = scrambled(SHAPES[1])
    mixed = Llama(SHAPES[1].model_copy(update={"dtype": "bfloat16"}))
    mixed.load_state_dict(exact.state_dict())
    tokens = torch.arange(16)[None]
    logits = mixed(tokens)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, exact(tokens))
    torch.testing.assert_close(logits, exact(tokens), rtol=0.1, atol=0.2)
    mixed(tokens, tokens).backward()
    assert {p.grad.dtype for p in mixed.parameters() if p.grad is not None} == {torch.float32}


def test_tied_embeddings_count_once() -> None:
    untied = SHAPES[0].model_copy(update={"tie_embeddings": False})
    difference = layout_of(build_model(untied, seed=0)).num_parameters
    difference -= layout_of(build_model(SHAPES[0], seed=0)).num_parameters
    assert difference == untied.vocab_size * untied.dim


def test_layout_takes_trainable_parameters_once_in_order() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(3, 4))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    names = [p.name for p in layout_of(model).parameters]
    assert names == ["0.weight", "1.weight", "1.bias", "2.bias"]


def test_pack_copies_every_parameter_and_pads_with_zeros() -> None:
    model = scrambled(SHAPES[1])
    layout = layout_of(model)
    theta = pack(model, layout)
    assert theta.dtype == np.float32
    assert theta.shape == (layout.num_elements,)
    assert np.count_nonzero(theta) == layout.num_parameters
    for name, tensor in unpack(theta, layout).items():
        assert np.array_equal(tensor, model.get_parameter(name).detach().numpy())


def test_unpack_gives_views_of_every_parameter() -> None:
    layout = layout_of(build_model(SHAPES[1], seed=0))
    theta = np.arange(layout.num_elements, dtype=np.float32)
    tensors = unpack(theta, layout)
    assert {name: t.shape for name, t in tensors.items()} == {
        p.name: p.shape for p in layout.parameters
    }
    tensors["norm.weight"][:] = -1
    assert (theta < 0).sum() == SHAPES[1].dim


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def oracle(
    config: ModelConfig, weights: dict[str, NDArray[np.float64]], tokens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Logits [positions, vocab] of one sequence, position by position and head by head."""
    x = weights["embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        w = {
            name.split(".", 2)[2]: value
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        x = x + attention(config, w, rms(x, w["input_layernorm.weight"]))
        y = rms(x, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        up = y @ w["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
    head = weights["embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return rms(x, weights["norm.weight"]) @ head.T


def attention(
    config: ModelConfig, w: dict[str, NDArray[np.float64]], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    width = config.dim // config.num_heads
    group = config.num_heads // config.num_kv_heads
    outputs = []
    for head in range(config.num_heads):
        mine = slice(head * width, (head + 1) * width)
        shared = slice(head // group * width, (head // group + 1) * width)
        q = turn(config, x @ w["self_attn.q_proj.weight"][mine].T)
        k = turn(config, x @ w["self_attn.k_proj.weight"][shared].T)
        v = x @ w["self_attn.v_proj.weight"][shared].T
        scores = q @ k.T / np.sqrt(width)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        mixing = np.exp(scores - scores.max(1, keepdims=True))
        outputs.append(mixing / mixing.sum(1, keepdims=True) @ v)
    return np.concatenate(outputs, 1) @ w["self_attn.o_proj.weight"].T


def turn(config: ModelConfig, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn pair (i, i + half) at position t by t * rope_theta^(-2i / width), as complex numbers."""
    half = x.shape[1] // 2
    angle = np.outer(np.arange(len(x)), config.rope_theta ** (-np.arange(half) / half))
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], 1)


def rms(x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPS) * weight
