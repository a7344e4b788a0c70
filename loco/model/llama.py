"""A small Llama (arXiv 2302.13971): RMSNorm, rotary positions, SwiGLU, grouped-query attention.

Names and maths follow Hugging Face's `LlamaForCausalLM`, so that an exported model loads there.
Shape suffixes: B sequences, S positions, D model width, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from loco.config import ModelConfig

NORM_EPS = 1e-5  # Llama 2 and later
EMBEDDING_STD = 0.02  # also of the output head: the first guess is close to uniform


class Llama(nn.Module):
    """Parameters are uninitialised memory: use `build_llama`, or load a state dict."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.embed_tokens = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim)
        if not config.tie_embeddings:
            self.lm_head = Linear(config.dim, config.vocab_size, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def head(self) -> nn.Linear | nn.Embedding:
        """What makes logits: the embedding where both are tied."""
        return self.embed_tokens if self.config.tie_embeddings else self.lm_head

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [B, S, vocab] fp32, or with `targets` the mean cross-entropy in nats (0-d fp32).

        `tokens` and `targets` are [B, S] int64; S may be anything up to `config.seq_len`. Runs
        under autocast where `config.dtype` is bfloat16.
        """
        mixed = self.config.dtype == "bfloat16"
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=mixed):
            logits = self._logits(tokens)
        logits = logits.float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _logits(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        rotary = (self.cos[:length], self.sin[:length])
        x_BSD: Tensor = self.embed_tokens(tokens)
        for block in self.layers:
            x_BSD = block(x_BSD, rotary)
        x_BSD = self.norm(x_BSD)
        return F.linear(x_BSD, self.head.weight)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def forward(self, x_BSD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        mixed_BSD: Tensor = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotary)
        out_BSD: Tensor = mixed_BSD + self.mlp(self.post_attention_layernorm(mixed_BSD))
        return out_BSD


class Attention(nn.Module):
    """Causal self-attention; each key/value head serves `num_heads / num_kv_heads` query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.grouped = config.num_kv_heads != config.num_heads
        self.q_proj = Linear(config.dim, config.num_heads * self.head_dim, bias=False)
        self.k_proj = Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = Linear(config.dim, config.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = Linear(config.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q_BHSE = rotate(self._heads(self.q_proj(x_BSD)), *rotary)
        k_BKSE = rotate(self._heads(self.k_proj(x_BSD)), *rotary)
        v_BKSE = self._heads(self.v_proj(x_BSD))
        y_BHSE = F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=self.grouped
        )
        out_BSD: Tensor = self.o_proj(y_BHSE.transpose(1, 2).flatten(2))
        return out_BSD

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Left to `build_llama`: PyTorch's own would draw from the global random state."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Left to `build_llama`, as in `Linear`."""


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency, each [seq_len, head_dim / 2] fp32."""
    head_dim = config.dim // config.num_heads
    frequencies = config.rope_theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(config.seq_len).float(), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864); a pair is one element of each half of a head."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def build_llama(config: ModelConfig, *, seed: int) -> Llama:
    """A model on the CPU whose fp32 parameters are a pure function of (config, seed).

    Draws from a generator of its own: the global random state is neither read nor advanced.
    """
    model = Llama(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _initialise(name, parameter, generator)
    return model


def _initialise(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Blocks start as the identity, which allows twice the learning rate (docs/lab-log.md, Recipe):
    what a block adds to the residual stream starts at zero, other matrices keep the variance."""
    if parameter.ndim == 1:
        parameter.fill_(1.0)
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        parameter.zero_()
    elif name in ("embed_tokens.weight", "lm_head.weight"):
        parameter.normal_(0.0, EMBEDDING_STD, generator=generator)
    else:
        parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[1]), generator=generator)
