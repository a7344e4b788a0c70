"""Export and load: the same tensors and logits, in Hugging Face's names; nothing overwritten.

Run alone: pytest tests/loco/test_export.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import load_file
from support.cluster import run_loco
from support.corpora import make_tokenizer, options, write_jsonl
from support.disk import files_up_to
from support.runs import create_store
from tokenizers import Tokenizer

from loco.config import Config, DataConfig, ModelConfig
from loco.errors import ConfigError, DataError, LocoError
from loco.export import FORMATS, export, load_exported
from loco.layout import Layout
from loco.model import Llama, build_model, layout_of, pack
from loco.tokens.prepare import prepare

TIED = ModelConfig(dim=24, num_layers=2, num_heads=3, num_kv_heads=1, ffn_dim=40, seq_len=16)
UNTIED = TIED.model_copy(update={"tie_embeddings": False, "rope_theta": 500.0})


def trained(config: ModelConfig) -> Llama:
    """A model whose every parameter matters; at the start whole blocks are zero."""
    model = build_model(config, seed=3)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def theta_of(config: ModelConfig) -> tuple[NDArray[np.float32], Layout]:
    model = trained(config)
    layout = layout_of(model)
    return pack(model, layout), layout


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_the_loaded_model_is_the_exported_one(config: ModelConfig, tmp_path: Path) -> None:
    theta, layout = theta_of(config)
    export(theta, layout, Config(model=config), tmp_path / "model")
    loaded = load_exported(tmp_path / "model")
    original = trained(config)
    assert loaded.config == config
    assert layout_of(loaded) == layout
    tokens = torch.arange(16)[None]
    assert torch.equal(loaded(tokens), original(tokens))
    loaded(tokens, tokens).backward()  # still trainable, still tied


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_names_are_those_of_hugging_face(config: ModelConfig, tmp_path: Path) -> None:
    export(*theta_of(config), Config(model=config), tmp_path / "model")
    names = set(load_file(tmp_path / "model" / "model.safetensors"))
    assert {n for n in names if ".layers." not in n} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
    } | (set() if config.tie_embeddings else {"lm_head.weight"})
    assert {n.removeprefix("model.layers.1.") for n in names if ".layers.1." in n} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    published = json.loads((tmp_path / "model" / "config.json").read_text())
    assert published["model_type"] == "llama"
    assert published["tie_word_embeddings"] is config.tie_embeddings


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_hugging_face_computes_the_same_logits(config: ModelConfig, tmp_path: Path) -> None:
    theta, layout = theta_of(config)
    export(theta, layout, Config(model=config), tmp_path / "model")
    rival = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "Fellow-Citizens: 5¢."
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == list(text.encode())
    assert tokenizer.decode(ids[0]) == text
    ours = load_exported(tmp_path / "model")
    torch.testing.assert_close(rival(ids[:, :16]).logits, ours(ids[:, :16]), atol=1e-5, rtol=1e-4)


def test_the_tokenizer_maps_each_byte_to_itself(tmp_path: Path) -> None:
    export(*theta_of(TIED), Config(model=TIED), tmp_path / "model")
    described = json.loads((tmp_path / "model" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = described["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["A"] == ord("A")
    assert vocabulary["Ġ"] == ord(" ")
    assert vocabulary["Ċ"] == ord("\n")


def test_an_existing_directory_is_refused_unless_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export(*theta_of(TIED), Config(model=TIED), tmp_path / "empty")
    with pytest.raises(ConfigError, match="is not an empty directory: choose another --out"):
        export(*theta_of(TIED), Config(model=TIED), tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not an empty directory"):
        export(*theta_of(TIED), Config(model=TIED), tmp_path / "file")


def test_what_an_interrupted_export_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "rest").touch()
    export(*theta_of(TIED), Config(model=TIED), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "rest").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_a_full_disk_leaves_nothing_behind(form: str, tmp_path: Path) -> None:
    refused = pytest.raises(LocoError, match=r"cannot write .*/model: .*; make room, or give")
    with files_up_to(16), refused:
        export(*theta_of(TIED), Config(model=TIED), tmp_path / "model", form=form)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_damaged_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not hold a model that loco exported"):
        load_exported(tmp_path / "none")
    export(*theta_of(TIED), Config(model=TIED), tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match="does not hold a model that loco exported"):
        load_exported(tmp_path / "model")


def test_plain_tensors_have_the_names_of_the_layout(tmp_path: Path) -> None:
    theta, layout = theta_of(TIED)
    export(theta, layout, Config(model=TIED), tmp_path / "out", form="safetensors")
    tensors = load_file(tmp_path / "out" / "theta.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        p.name: p.shape for p in layout.parameters
    }
    first = layout.parameters[0]
    assert np.array_equal(tensors[first.name].ravel(), theta[: first.numel])
    with pytest.raises(ConfigError, match="--format 'gguf' is not known: use hf or safetensors"):
        export(theta, layout, Config(model=TIED), tmp_path / "b", form="gguf")


BPE = TIED.model_copy(update={"vocab_size": 300})


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Prepared with a tokenizer whose documents end with <end>."""
    make_tokenizer(tmp_path / "tokenizer")
    source = write_jsonl(tmp_path / "a.jsonl")
    made = options([source], tmp_path / "corpus", tokenizer=str(tmp_path / "tokenizer"))
    prepare(made, lambda done, total: None)
    return tmp_path / "corpus"


@pytest.mark.parametrize("name", ["{0}", "mix:1*{0},2*{0}", "mix:1*/not/here,2*{0}"])
@pytest.mark.parametrize("of_site", [False, True])
def test_the_tokenizer_of_a_prepared_corpus_goes_along(
    name: str, of_site: bool, corpus: Path, tmp_path: Path
) -> None:
    """By itself, in a mixture, and of one site alone; with its end-of-text token."""
    given = name.format(corpus)
    named: dict[str, Any] = {"corpus": given}
    if of_site:
        named = {"corpus": "/not/here", "sites": {"paris": given}}
    config = Config(model=BPE, data=DataConfig(**named))
    assert export(*theta_of(BPE), config, tmp_path / "model") is None
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (
        corpus / "tokenizer.json"
    ).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    rival = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    ours = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    assert tokenizer("Document 5").input_ids == ours.encode("Document 5").ids
    assert tokenizer.eos_token == "<end>"
    assert tokenizer.eos_token_id == rival.eos_token_id == ours.token_to_id("<end>")
    assert load_exported(tmp_path / "model").config == BPE


@pytest.mark.parametrize(
    ("model", "data", "told"),
    [
        (BPE, {"corpus": "/not/here"}, True),
        (BPE, {"corpus": "sotu"}, True),  # sites may have --data of their own
        (TIED, {"corpus": "/not/here"}, False),
        (TIED, {"corpus": "/not/here", "tokenizer_digest": "1" * 32}, True),
        (BPE, {"corpus": "/not/here", "tokenizer_digest": "bytes"}, False),
    ],
)
def test_bytes_are_not_claimed_of_a_model_that_may_have_other_tokens(
    model: ModelConfig, data: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    config = Config(model=model, data=DataConfig(**data))
    lacks = export(*theta_of(model), config, tmp_path / "model")
    written = [path.name for path in (tmp_path / "model").glob("tokenizer*")]
    if told:
        assert (written, (lacks or "").split(",")[0]) == ([], "no tokenizer was written")
    else:
        assert (sorted(written), lacks) == (["tokenizer.json", "tokenizer_config.json"], None)
        vocabulary = json.loads((tmp_path / "model" / "tokenizer.json").read_text("utf-8"))
        assert len(vocabulary["model"]["vocab"]) == 256


def test_a_corpus_of_another_tokenizer_than_the_runs_is_passed_over(
    corpus: Path, tmp_path: Path
) -> None:
    """Prepared anew on this machine while the run went on, for example."""
    config = Config(model=BPE, data=DataConfig(corpus=str(corpus), tokenizer_digest="1" * 32))
    assert "no tokenizer was written" in str(export(*theta_of(BPE), config, tmp_path / "model"))
    assert not list((tmp_path / "model").glob("tokenizer*"))


def test_the_command_says_that_there_is_no_tokenizer(tmp_path: Path) -> None:
    theta, layout = theta_of(BPE)
    config = Config(model=BPE, data=DataConfig(corpus="/not/here"))
    create_store(tmp_path / "state", config, layout=layout, theta=theta).close()
    done = run_loco("export", "--state", str(tmp_path / "state"), "--out", str(tmp_path / "model"))
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)
    assert done.stderr.startswith("no tokenizer was written, because none is known on this machine")


def test_a_manifest_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "manifest.json").write_text("{}")
    config = Config(model=TIED, data=DataConfig(corpus=str(tmp_path / "corpus")))
    with pytest.raises(DataError, match="is not a manifest of loco data prepare"):
        export(*theta_of(TIED), config, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
