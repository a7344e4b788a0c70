"""Write theta as a model directory that others can load, or as plain tensors.

`hf`: a directory for `AutoModelForCausalLM.from_pretrained`

    model.safetensors       fp32 tensors; those of the built-in Llama as in `LlamaForCausalLM`
    config.json             a `LlamaConfig`, or that of `model.hf`
    tokenizer.json          of `model.hf`, or of a prepared corpus of the run; where tokens are
                            bytes, these in the format of the `tokenizers` library
    tokenizer_config.json   how `AutoTokenizer` wraps it

Where no tokenizer is known on this machine, none is written: a wrong one would be worse.

`safetensors`: theta.safetensors alone, with the names of the layout, for a model of your own.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from loco.config import Config, ModelConfig
from loco.errors import ConfigError, DataError, LocoError
from loco.export_tokenizer import Known, known_tokenizer, write_json
from loco.layout import Layout
from loco.model import Llama, unpack
from loco.model.hugging_face import build_hugging_face
from loco.model.llama import NORM_EPS

FORMATS = ("hf", "safetensors")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_TOKENIZERS = {"tokenizer.json", "vocab.json", "tokenizer.model"}  # each one whole without others


def export(
    theta: NDArray[np.float32], layout: Layout, config: Config, out: Path, *, form: str = "hf"
) -> str | None:
    """Write `theta` ([layout.num_elements] fp32, padded) as a directory `out` in one of `FORMATS`.

    Returns a sentence on what it lacks, None if nothing: a tokenizer may not be known here.

    The directory appears whole or not at all. ConfigError if `out` exists and is not an empty one,
    DataError if a prepared corpus of the run has a manifest that cannot be read, LocoError if it
    cannot be written.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format {form!r} is not known: use {' or '.join(FORMATS)}")
    if form == "hf" and config.model.file:
        raise ConfigError(
            "the run trains a model of your own, which transformers does not know: use "
            "--format safetensors"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory: choose another --out")
    aside = out.with_name(out.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        lacks = _write(unpack(theta, layout), config, aside, form)
        aside.replace(out)
    except (OSError, SafetensorError) as error:
        raise LocoError(f"cannot write {out}: {error}; make room, or give another --out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return lacks


def _write(
    tensors: dict[str, NDArray[np.float32]], config: Config, to: Path, form: str
) -> str | None:
    if form == "safetensors":
        save_file(tensors, to / "theta.safetensors", metadata={"format": "pt"})
        return None
    if config.model.hf:
        return _write_hugging_face(tensors, config, to)
    published = {_published(name): tensor for name, tensor in tensors.items()}
    save_file(published, to / "model.safetensors", metadata={"format": "pt"})
    tokenizer = known_tokenizer(config, vocab_size=config.model.vocab_size)
    end = tokenizer.end_id() if tokenizer else None
    write_json(to / "config.json", _llama_config(config.model) | {"eos_token_id": end})
    return _write_tokenizer(tokenizer, config, to)


def _write_hugging_face(
    tensors: dict[str, NDArray[np.float32]], config: Config, to: Path
) -> str | None:
    """What `save_pretrained` writes, with theta in it; buffers are those of a new model."""
    model = build_hugging_face(config.model, seed=config.run.seed)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            named[name].copy_(torch.from_numpy(tensor))
    model.hf.save_pretrained(to)
    if _copy_tokenizer_of_model(config.model, to):
        return None
    return _write_tokenizer(known_tokenizer(config, vocab_size=model.vocab_size), config, to)


def _write_tokenizer(tokenizer: Known | None, config: Config, to: Path) -> str | None:
    if tokenizer:
        tokenizer.write(to, seq_len=config.model.seq_len)
        return None
    source = f" or of {config.model.hf}" if config.model.hf else ""
    return (
        "no tokenizer was written, because none is known on this machine: copy tokenizer.json of "
        f"the corpus that sites train on{source} into the directory"
    )


def _copy_tokenizer_of_model(config: ModelConfig, to: Path) -> bool:
    """Whether the directory that `model.hf` names has one."""
    source = Path(config.hf).expanduser()
    found = [file for name in _TOKENIZER_FILES if (file := source / name).is_file()]
    for file in found:
        shutil.copyfile(file, to / file.name)
    return any(file.name in _TOKENIZERS for file in found)


def load_exported(path: Path) -> Llama:
    """The model that `export` wrote to `path`, in fp32; DataError if it is missing or damaged."""
    try:
        model = Llama(_model_config(json.loads((path / "config.json").read_text())))
        tensors = load_file(path / "model.safetensors")
        state = {_local(name): torch.from_numpy(tensor) for name, tensor in tensors.items()}
        model.load_state_dict(state)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"{path} does not hold a model that loco exported: {error}") from error
    return model


def _published(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _local(name: str) -> str:
    return name.removeprefix("model.")


def _llama_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.dim // config.num_heads,
        "max_position_embeddings": config.seq_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }


def _model_config(published: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        vocab_size=published["vocab_size"],
        dim=published["hidden_size"],
        ffn_dim=published["intermediate_size"],
        num_layers=published["num_hidden_layers"],
        num_heads=published["num_attention_heads"],
        num_kv_heads=published["num_key_value_heads"],
        seq_len=published["max_position_embeddings"],
        rope_theta=published["rope_theta"],
        tie_embeddings=published["tie_word_embeddings"],
    )
