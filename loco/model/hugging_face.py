"""Any causal language model of the transformers library, behind the interface of `Llama`.

Only files in transformers' own formats are read: code that comes with a model is never run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from loco.config import ModelConfig
from loco.errors import ConfigError, install_extra


class HuggingFace(nn.Module):
    """`model(tokens, targets)` of a transformers model; its parameters have the prefix `hf.`."""

    PREFIX = "hf."

    def __init__(self, hf: Any, config: ModelConfig) -> None:
        super().__init__()
        self.hf = hf
        self.vocab_size: int = hf.config.get_text_config().vocab_size
        self._mixed = config.dtype == "bfloat16"

    @property
    def head(self) -> nn.Module | None:
        """What makes logits; None if the model does not say."""
        head: nn.Module | None = self.hf.get_output_embeddings()
        return head

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [B, S, vocab] fp32, or with `targets` the mean cross-entropy in nats (0-d fp32).

        `tokens` and `targets` are [B, S] int64. Runs under autocast where `model.dtype` is
        bfloat16.
        """
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=self._mixed):
            logits: Tensor = self.hf(input_ids=tokens, use_cache=False).logits
        logits = logits.float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_hugging_face(config: ModelConfig, *, seed: int) -> HuggingFace:
    """The model that `model.hf` names, in fp32 on the default device, in training mode.

    With `model.pretrained` its weights are read, else they are drawn from `seed`; the global random
    state is left as it was.

    Raises:
        ConfigError: transformers is missing; the name leads nowhere, needs code of its own, or has
            no causal language model; a value in its config.json is none that it can have; its
            weights are no safetensors (other files are pickles); `model.seq_len` is longer than it
            allows.
    """
    transformers = _library()
    name = str(Path(config.hf).expanduser()) if _is_path(config.hf) else config.hf
    if _is_path(config.hf) and not Path(name, "config.json").is_file():
        raise ConfigError(f"model.hf = {config.hf!r} is not a directory with a config.json here")
    automatic = transformers.AutoModelForCausalLM
    try:
        described = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        _check_length(config, described)
        if config.pretrained:
            hf = automatic.from_pretrained(
                name, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
            )
        else:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                hf = automatic.from_config(described, trust_remote_code=False, dtype=torch.float32)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # of any kind: whatever its config.json leads the model's code to
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"model.hf = {config.hf!r} cannot be built: {first}") from error
    return HuggingFace(hf.train(), config)  # from_pretrained leaves it in evaluation mode


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"model.hf needs the transformers library: {install_extra('hf')}"
        ) from None
    library: Any = transformers  # its types leave gaps
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~"))


def _check_length(config: ModelConfig, described: Any) -> None:
    longest = getattr(described.get_text_config(), "max_position_embeddings", None)
    if longest is not None and config.seq_len > longest:
        raise ConfigError(
            f"model.seq_len = {config.seq_len} is out of range: model.hf = {config.hf!r} has "
            f"positions for 2 to {longest} tokens"
        )
