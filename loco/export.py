"""Write theta as a model directory that others can load, or as plain tensors.

`hf`: a directory for `AutoModelForCausalLM.from_pretrained`

    model.safetensors       fp32 tensors; those of the built-in Llama as in `LlamaForCausalLM`
    config.json             a `LlamaConfig`, or that of `model.hf`
    tokenizer.json          that of the prepared corpus or of `model.hf`; else bytes as tokens, in
                            the format of the `tokenizers` library
    tokenizer_config.json   how `AutoTokenizer` wraps it

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
from loco.layout import Layout
from loco.model import Llama, unpack
from loco.model.hugging_face import build_hugging_face
from loco.model.llama import NORM_EPS
from loco.tokens import is_prepared
from loco.tokens.prepare import TOKENIZER

FORMATS = ("hf", "safetensors")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def export(
    theta: NDArray[np.float32], layout: Layout, config: Config, out: Path, *, form: str = "hf"
) -> None:
    """Write `theta` ([layout.num_elements] fp32, padded) as a directory `out` in one of `FORMATS`.

    The directory appears whole or not at all. ConfigError if `out` exists and is not an empty one,
    LocoError if it cannot be written.
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
        _write(unpack(theta, layout), config, aside, form)
        aside.replace(out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise LocoError(f"cannot write {out}: {error}; make room, or give another --out") from error


def _write(tensors: dict[str, NDArray[np.float32]], config: Config, to: Path, form: str) -> None:
    if form == "safetensors":
        save_file(tensors, to / "theta.safetensors", metadata={"format": "pt"})
    elif config.model.hf:
        _write_hugging_face(tensors, config, to)
    else:
        published = {_published(name): tensor for name, tensor in tensors.items()}
        save_file(published, to / "model.safetensors", metadata={"format": "pt"})
        _write_json(to / "config.json", _llama_config(config.model))
        _write_tokenizer(config, to)


def _write_hugging_face(tensors: dict[str, NDArray[np.float32]], config: Config, to: Path) -> None:
    """What `save_pretrained` writes, with theta in it; buffers are those of a new model."""
    model = build_hugging_face(config.model, seed=config.run.seed)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors.items():
            named[name].copy_(torch.from_numpy(tensor))
    model.hf.save_pretrained(to)
    source = Path(config.model.hf).expanduser()
    for file in (source / name for name in _TOKENIZER_FILES):
        if file.is_file():
            shutil.copyfile(file, to / file.name)


def _write_tokenizer(config: Config, to: Path) -> None:
    prepared = Path(config.data.corpus).expanduser() / TOKENIZER
    if is_prepared(config.data.corpus) and prepared.exists():
        shutil.copyfile(prepared, to / "tokenizer.json")
    else:
        _write_json(to / "tokenizer.json", _byte_tokenizer())
    _write_json(to / "tokenizer_config.json", _tokenizer_config(config.model))


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
        "eos_token_id": None,
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


def _byte_tokenizer() -> dict[str, Any]:
    """A BPE without merges: each byte is the token of its own value."""
    alphabet = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level | {"trim_offsets": True},
        "decoder": byte_level | {"trim_offsets": True},
        "model": {"type": "BPE", "vocab": alphabet, "merges": []},
    }


def _byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, as `ByteLevel` expects: those that print stand
    for themselves, the others for code points from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.seq_len,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
