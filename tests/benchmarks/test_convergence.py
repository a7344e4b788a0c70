"""The convergence grid: the rival against our own form of it, and tables against the runs.

Compared with: the simulation of dense DiLoCo, and numbers worked out by hand. Run alone:
pytest tests/benchmarks/test_convergence.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.convergence import check_device, key_of, run, simulated_run
from benchmarks.convergence_search import by_density
from benchmarks.convergence_tables import STEPS, Setting, settings
from benchmarks.methods import METHODS, changed, config_of
from benchmarks.simulation import all_reduce_bytes
from benchmarks.torchft_diloco import torchft_run
from loco.config import Config, parse_config, preset_text
from loco.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 1,
    "model.ffn_dim": 24, "model.seq_len": 16, "data.batch": 2, "inner.steps": 2,
    "inner.warmup_steps": 0, "eval.sequences": 16,
}  # fmt: skip


def config_of_method(name: str, **changes: Any) -> Config:
    base = config_of(METHODS[name], model="small", sites=2, data="eras", rounds=2, seed=0)
    return changed(base, SMALLEST | changes)


@pytest.mark.slow
def test_torchfts_diloco_is_ours() -> None:
    """Both take the same steps, up to the order of additions; two rounds, so momentum counts."""
    theirs = torchft_run(config_of_method("torchft-diloco"))
    ours = simulated_run(config_of_method("diloco"), METHODS["diloco"])
    assert theirs["val_bpb"].keys() == ours["val_bpb"].keys() == {0, 2}
    assert ours["val_bpb"][2] < ours["val_bpb"][0] - 0.01
    assert theirs["val_bpb"][2] == pytest.approx(ours["val_bpb"][2], abs=1e-5)
    assert theirs["traces"]["train_bpb"] == pytest.approx(ours["traces"]["train_bpb"], abs=1e-4)


def test_data_parallel_sends_a_rings_bytes_in_every_step() -> None:
    config = config_of_method("ddp", **{"run.rounds": 1})
    run = simulated_run(config, METHODS["ddp"])
    assert run["traces"]["bytes_up"] == [2 * run["dense_bytes"]]
    assert all_reduce_bytes(1200, 4) == 1800


def test_a_line_says_where_it_was_made() -> None:
    """Sums of other processors end in other digits; who compares two lines must see that."""
    line = run(config_of_method("ddp", **{"run.rounds": 1}), METHODS["ddp"])
    assert line["commit"]
    assert line["machine"].endswith(f", {torch.backends.cpu.get_cpu_capability()}")
    assert not line["machine"].startswith(",")


def test_the_key_of_a_run_tells_methods_apart_and_forgets_defaults() -> None:
    shape: dict[str, Any] = {"model": "small", "sites": 2, "data": "eras", "rounds": 60, "seed": 0}
    configs = {name: config_of(method, **shape) for name, method in METHODS.items()}
    keys = {name: key_of(METHODS[name], config) for name, config in configs.items()}
    assert len(set(keys.values())) == len(METHODS)
    same = changed(configs["mean"], {"outer.max_value": 1000.0})  # its default
    assert key_of(METHODS["mean"], same) == keys["mean"]


def run_of(seed: int, loss: float, **other: Any) -> dict[str, Any]:
    shape = {"model": "small", "data": "eras", "sites": 2, "rounds": 60, "inner_steps": 15}
    rest = {"method": "mean", "lr": 4e-3, "k": 64, "changes": {}}
    return {"seed": seed, "val_bpb_end": loss, **shape, **rest, **other}


def test_a_setting_is_compared_over_the_seeds_that_both_have() -> None:
    ours, theirs = settings(
        [run_of(0, 2.2), run_of(0, 2.0, method="ddp"), run_of(1, 4.0), run_of(2, 8.0, method="ddp")]
    )
    assert ours.loss() == "3.100 (2.200 to 4.000)"
    assert theirs.against(ours) == "-9.1 %"
    assert ours.against(theirs) == "+10.0 %"
    assert ours.against(Setting((run_of(5, 1.0),))) == ""


def test_a_curve_over_k_has_runs_of_one_length_only() -> None:
    kept = by_density()["kept"]
    points = [setting.first for by_k in kept.values() for setting in by_k.values()]
    assert {run["inner_steps"] * run["rounds"] for run in points} == {STEPS}
    assert set(kept[60]) >= {512, 1024, 2048, 4096}


def test_bytes_are_counted_against_gradients_in_every_step() -> None:
    """Two sites, 1,000 bytes of parameters, 10 steps: DDP sends 10,000 each way."""
    traces = {"bytes_up": [80, 120], "bytes_down": [200, 200]}
    setting = Setting((run_of(0, 2.0, inner_steps=10, dense_bytes=1000, traces=traces),))
    assert setting.fewer_than_ddp("up") == pytest.approx(100.0)
    assert setting.fewer_than_ddp("up", "down") == pytest.approx(10_000 / 150)


def test_a_device_for_a_method_that_runs_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cuda is for simulated sites"):
        check_device("cuda", METHODS["torchft-diloco"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_a_device_that_is_not_there_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* finds no GPU here"):
        check_device("cuda", METHODS["kept"])


@pytest.mark.parametrize(
    ("vary", "told"),
    [
        (("outer.unsent", "replica"), "'replica' is no TOML value; a string has quotes of its own"),
        (("codec.ks", "64"), "unknown key 'codec.ks' (did you mean 'k'?)"),
        (("steps", "64"), "unknown key 'steps' (did you mean 'state'?)"),
        (("codec.k", "5000"), "codec.k = 5000: input should be less than or equal to 4096"),
    ],
)
def test_what_cannot_be_varied_is_named(vary: tuple[str, str], told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.convergence", "--out", str(tmp_path / "runs")]
    done = subprocess.run(
        [*command, "--vary", *vary], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 1
    assert done.stderr.startswith("benchmarks.convergence: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        ("convergence", ["--out", "."], "--out . is a directory: name a file of JSON lines"),
        ("convergence", ["--out", "cut.jsonl"], "line 2 is no run, or was cut off"),
        ("downlink", ["--out", "x", "--sites", "0"], "--sites 0 is out of range: at least 1"),
        ("overlap", ["--out", "x", "--delay", "99"], "outer.delay_steps = 99 must be at most"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    program: str, words: list[str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "cut.jsonl").write_text('{"key": "a"}\n{"key": "b", "val')
    words = [word.replace("cut.jsonl", str(tmp_path / "cut.jsonl")) for word in words]
    command = [sys.executable, "-m", f"benchmarks.{program}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 1
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["125m", "1b"])
def test_the_larger_presets_have_the_outer_step_that_won(name: str) -> None:
    ramp = {"codec.k_start", "codec.k_ramp_rounds"}
    preset = parse_config(preset_text(name), source=name).model_dump()
    for key, value in METHODS["kept-thin"].changes.items():
        section, _, field = key.partition(".")
        assert key in ramp or preset[section][field] == value, key


def test_the_largest_model_is_the_preset_of_that_name() -> None:
    """But for the length of sequences, which its tokens a step do not need."""
    ours = config_of(METHODS["kept"], model="125m", sites=2, data="eras", rounds=1, seed=0).model
    preset = parse_config(preset_text("125m"), source="125m").model
    theirs = preset.model_copy(update={"seq_len": ours.seq_len, "tie_embeddings": True})
    assert ours == theirs
