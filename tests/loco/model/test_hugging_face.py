"""Models of transformers behind loco's interface, against transformers itself; and back again.

Run alone: pytest tests/loco/model/test_hugging_face.py
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import transformers
from safetensors.torch import load_file
from support.cluster import Cluster, run_loco
from torch.nn import functional as F  # noqa: N812

from coordinator.recovery import recover
from coordinator.store import Store
from loco.config import Config, ModelConfig, config_from_dict, config_from_json
from loco.errors import ConfigError
from loco.export import export
from loco.inner.muon import hidden_matrices
from loco.model import build_model, layout_of, pack
from loco.plan_view import layout_of_config

TOKENS = torch.arange(12).reshape(2, 6) % 50


def save(directory: Path, config: Any, *, weights: bool = False) -> str:
    """A model directory as people have it; with weights that no seed of ours gives."""
    if weights:
        with torch.random.fork_rng():
            torch.manual_seed(99)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    else:
        config.save_pretrained(directory)
    return str(directory)


def gpt2() -> Any:
    """Tied embeddings, biases, dropout, learned positions: all that the built-in Llama has not."""
    return transformers.GPT2Config(
        vocab_size=60,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )


def llama() -> Any:
    return transformers.LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


@pytest.mark.parametrize("described", [gpt2, llama])
def test_logits_and_loss_are_those_of_transformers(described: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "model", described(), weights=True)
    rival = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    model = build_model(ModelConfig(hf=path, pretrained=True, seq_len=32), seed=0).eval()
    assert model.vocab_size == 60
    logits = rival(TOKENS).logits
    assert torch.equal(model(TOKENS), logits)
    assert torch.equal(
        model(TOKENS, TOKENS.flip(1)),
        F.cross_entropy(logits.flatten(0, 1), TOKENS.flip(1).flatten()),
    )
    assert model(TOKENS).dtype == torch.float32
    mixed = ModelConfig(hf=path, pretrained=True, seq_len=32, dtype="bfloat16")
    half = build_model(mixed, seed=0).eval()(TOKENS)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, logits, atol=0.05, rtol=0.05)
    assert not torch.equal(half, logits)


@pytest.mark.parametrize("described", [gpt2, llama])
def test_muon_gets_neither_embeddings_nor_the_head(described: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "model", described(), weights=True)
    model = build_model(ModelConfig(hf=path, seq_len=32), seed=0)
    hidden = hidden_matrices(model)
    left = {name for name, p in model.named_parameters() if p.ndim == 2 and p not in hidden}
    assert (
        left
        == {
            gpt2: {"hf.transformer.wte.weight", "hf.transformer.wpe.weight"},
            llama: {"hf.model.embed_tokens.weight", "hf.lm_head.weight"},
        }[described]
    )


@pytest.mark.parametrize("pretrained", [True, False])
def test_dropout_is_at_work_until_evaluation_is_asked_for(pretrained: bool, tmp_path: Path) -> None:
    """transformers gives a model with weights in evaluation mode, one without in training mode."""
    path = save(tmp_path / "model", gpt2(), weights=True)
    model = build_model(ModelConfig(hf=path, pretrained=pretrained, seq_len=32), seed=0)
    assert all(module.training for module in model.modules())
    assert not torch.equal(model(TOKENS), model(TOKENS))
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))


def test_weights_in_a_pickle_are_not_read(tmp_path: Path) -> None:
    path = save(tmp_path / "model", gpt2(), weights=True)
    safe = Path(path, "model.safetensors")
    torch.save(load_file(safe), Path(path, "pytorch_model.bin"))
    safe.unlink()
    with pytest.raises(ConfigError, match=r"cannot be built: .*safetensors"):
        build_model(ModelConfig(hf=path, pretrained=True, seq_len=8), seed=0)


def test_random_weights_follow_the_seed_and_leave_the_random_state_alone(tmp_path: Path) -> None:
    config = ModelConfig(hf=save(tmp_path / "model", gpt2(), weights=True), seq_len=8)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = (build_model(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    thetas = [pack(model, layout_of(model)) for model in (one, two, other)]
    assert (thetas[0] == thetas[1]).all()
    assert (thetas[0] != thetas[2]).any()


def test_a_tied_parameter_is_laid_out_once(tmp_path: Path) -> None:
    path = save(tmp_path / "model", gpt2())
    layout = layout_of_config(Config(model=ModelConfig(hf=path, seq_len=8)))
    names = [p.name for p in layout.parameters]
    assert "hf.transformer.wte.weight" in names
    assert not [name for name in names if "lm_head" in name]
    rival = transformers.AutoModelForCausalLM.from_config(gpt2())
    assert layout.num_parameters == rival.num_parameters()


@pytest.mark.parametrize("described", [gpt2, llama])
def test_an_export_is_a_model_directory_with_theta(described: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "model", described())
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    config = Config(model=ModelConfig(hf=path, seq_len=8))
    trained = build_model(config.model, seed=3).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.1
    layout = layout_of(trained)
    export(pack(trained, layout), layout, config, tmp_path / "out")
    rival = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(rival(TOKENS).logits, trained(TOKENS))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"model": "gpt2"}, "model = 'gpt2' is not understood: write 'hf:PATH_OR_ID'"),
        ({"model": {"hf": "x", "dim": 64}}, r"model\.dim would be ignored, because model\.hf"),
        ({"model": {"pretrained": True}}, "pretrained = true needs hf"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_from_dict(raw, source="run.toml")


def test_the_short_form_is_the_long_one_and_travels_to_sites() -> None:
    short = config_from_dict({"model": "hf:./here"}, source="run.toml")
    assert short == config_from_dict({"model": {"hf": "./here"}}, source="run.toml")
    assert config_from_json(short.to_json()) == short


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    def refused(said: str, **keys: Any) -> None:
        with pytest.raises(ConfigError, match=said):
            build_model(ModelConfig(**keys), seed=0)

    refused(r"is not a directory with a config\.json here", hf=str(tmp_path))
    path = save(tmp_path / "model", gpt2())
    refused(r"model\.seq_len = 33 is out of range: .* for 2 to 32 tokens", hf=path, seq_len=33)
    refused("cannot be built", hf=path, seq_len=8, pretrained=True)  # it has no weights
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    for key, value in (("vocab_size", "abc"), ("n_head", 0), ("n_embd", [1])):
        wrong = json.dumps(described | {key: value})
        (tmp_path / "model" / "config.json").write_text(wrong)
        refused("cannot be built", hf=path, seq_len=8)
    own_code = {"auto_map": {"AutoConfig": "mine.Config"}, "model_type": "mine"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(described | own_code))
    (tmp_path / "model" / "mine.py").write_text("raise SystemExit('this code must not run')")
    refused("cannot be built", hf=path, seq_len=8)
    save(tmp_path / "vision", transformers.ViTConfig())
    refused("cannot be built", hf=str(tmp_path / "vision"), seq_len=8)


@pytest.mark.slow
def test_a_run_with_a_model_of_transformers(tmp_path: Path) -> None:
    described = llama()
    described.vocab_size = 256
    path = save(tmp_path / "model", described)
    quorum, evaluated = {"min_sites": 1}, {"every_rounds": 2}
    with Cluster(tmp_path, run={"rounds": 2}, quorum=quorum, eval=evaluated) as cluster:
        raw = tomllib.loads(cluster.config.read_text())
        cluster.config.write_text(tomli_w.dumps(raw | {"model": {"hf": path, "seq_len": 32}}))
        coordinator = cluster.coordinator()
        status = cluster.finish(cluster.site("paris"))
        coordinator.interrupt()
        coordinator.wait()
    assert [site["theta_digest"] for site in status["sites"]] == [status["theta_digest"]]
    first, last = (v["bits_per_byte"] for v in status["validation"])
    assert last < first
    out = tmp_path / "out"
    done = run_loco("export", "--state", str(cluster.state), "--out", str(out), "--format", "hf")
    assert done.returncode == 0, done.stderr
    store = Store.open(cluster.state)
    try:
        _, reducer = recover(store)
        rival = transformers.AutoModelForCausalLM.from_pretrained(out)
        for name, parameter in rival.named_parameters():
            (p,) = (p for p in store.layout.parameters if p.name == f"hf.{name}")
            theta = reducer.theta[p.start : p.start + p.numel].reshape(p.shape)
            assert (parameter.detach().numpy() == theta).all()
    finally:
        store.close()
