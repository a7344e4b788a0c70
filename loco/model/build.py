"""The model that a config describes."""

from __future__ import annotations

from loco.config import ModelConfig
from loco.errors import ConfigError
from loco.model.hugging_face import HuggingFace, build_hugging_face
from loco.model.llama import Llama, build_llama


def build_model(config: ModelConfig, *, seed: int) -> Llama | HuggingFace:
    """A model in fp32: `model(tokens, targets)` gives the loss, `vocab_size` bounds its tokens.

    ConfigError if `config.hf` cannot be built.
    """
    if config.file:
        raise ConfigError(
            f"the run trains a model of your own (model.file = {config.file!r}), which only your "
            "program can build: join it from there with loco.join"
        )
    if config.hf:
        return build_hugging_face(config, seed=seed)
    return build_llama(config, seed=seed)
