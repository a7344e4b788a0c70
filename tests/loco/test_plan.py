"""Predictions: sizes against codec, outer step and a real run; seconds against arithmetic.

Run alone: pytest tests/loco/test_plan.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cluster import Cluster, run_loco
from support.runs import Array, config_of, shard_body, vector

from benchmarks.recorded import SCALING_FIT, WAN_RUNS, read, wan_setting
from benchmarks.scaling import load_of, rounds_in
from loco import codec
from loco.codec import HEADER_BYTES
from loco.config import Config, OuterConfig
from loco.errors import ConfigError
from loco.layout import CHUNK, Layout
from loco.model import save_parameters
from loco.outer import Fragments
from loco.outer.step import OuterRules, Piece, outer_step
from loco.plan import OwnFragment, Setting, advice, contribution_size, predict, update_size
from loco.plan_view import layout_of_config

# Matrices, and vectors shorter than a chunk: 200 of them, as in a real model.
LAYOUT = Layout.of([("w", (300, 4096)), *((f"norm.{i}", (200 + i,)) for i in range(100))])
SETTING = Setting(
    layout=LAYOUT,
    sites=2,
    ranks=1,
    k=64,
    k_sites=1000,
    bits=2,
    inner_steps=30,
    fragments=1,
    delay_steps=0,
    step_seconds=2.0,
    up_mbit=100.0,
    down_mbit=100.0,
    coordinator_mbit=None,
    rtt_ms=0.0,
)

KS_OF_ROUNDS = (512, 181, 64, 64, 64, 64, 2048, 2048)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("k", "bits"), [(1, 2), (64, 1), (64, 2), (1000, 2), (4096, 1), (64, 32)])
def test_a_contribution_has_the_predicted_size(k: int, bits: int, ranks: int) -> None:
    config = config_of(codec={"k": k, "bits": bits})
    a = vector(LAYOUT, seed=3)
    shards = [shard_body(a, config, layout=LAYOUT, rank=rank, ranks=ranks) for rank in range(ranks)]
    predicted, _ = contribution_size(replace(SETTING, k=k, bits=bits, ranks=ranks))
    assert predicted == pytest.approx(sum(map(len, shards)), rel=0.04, abs=1200)


@pytest.mark.parametrize("sites", [1, 2, 4, 16])
@pytest.mark.parametrize("k", [16, 64, 512])
def test_an_update_of_independent_sites_has_the_predicted_size(sites: int, k: int) -> None:
    layout = Layout.of([("w", (100, 4096))])
    config = config_of(codec={"k": k})
    theta = np.zeros(layout.num_elements, np.float32)
    pieces = [
        Piece(
            start=0,
            num_elements=theta.size,
            weight=1 / sites,
            scale=1.0,
            payload=shard_body(vector(layout, seed=site), config, layout=layout),
        )
        for site in range(sites)
    ]
    rules = OuterRules(aggregation="mean_contributors", alpha=1.0, momentum=0.0, bits=2)
    residual: Array = np.zeros_like(theta)
    update = outer_step(rules, pieces, theta=theta, residual=residual, momentum=None)
    predicted, _ = update_size(replace(SETTING, layout=layout, sites=sites, k=k))
    assert predicted == pytest.approx(len(update), rel=0.05, abs=400)


def test_a_round_of_fragments_has_the_predicted_size() -> None:
    a, zero = vector(LAYOUT, seed=3), np.zeros(LAYOUT.num_elements, np.float32)
    outer = OuterConfig(fragments=4)
    active = Fragments(outer, LAYOUT).in_round(range(LAYOUT.num_chunks), 1)
    sent = codec.encode_fragment(a, zero, zero.copy(), active=active, beta=0.0, k=64, bits=2)
    predicted, values = contribution_size(replace(SETTING, fragments=4))
    assert predicted == pytest.approx(len(sent.payload), rel=0.05, abs=400)
    assert values == pytest.approx(sent.num_values, rel=0.05)


def test_a_round_is_the_mean_over_the_turns_of_fragments_with_rules_of_their_own() -> None:
    own = {"embed": {"tensors": ["embed"], "k": 512, "bits": 1}}
    layout = Layout.of([("embed", (40, 4096)), ("w", (200, 4096))])
    outer = OuterConfig.model_validate({"fragments": 2, "own_fragments": own})
    fragments, zero = Fragments(outer, layout), np.zeros(layout.num_elements, np.float32)
    sent, updates = [], []
    for round_, (k, bits) in enumerate([(64, 2), (64, 2), (512, 1)]):
        active = fragments.in_round(range(layout.num_chunks), round_)
        both = [
            codec.encode_fragment(
                vector(layout, site), zero, zero.copy(), active=active, beta=0.0, k=k, bits=bits
            )
            for site in range(2)
        ]
        sent.append(both[0])
        pieces = [
            Piece(start=0, num_elements=zero.size, weight=0.5, scale=1.0, payload=one.payload)
            for one in both
        ]
        rules = OuterRules(aggregation="mean", alpha=1.0, momentum=0.0, bits=bits)
        buffers = {"theta": zero.copy(), "residual": zero.copy(), "momentum": None}
        updates.append(len(outer_step(rules, pieces, **buffers)))
    setting = replace(
        SETTING,
        layout=layout,
        fragments=2,
        own_fragments=(OwnFragment(tensors=frozenset(["embed"]), k=512, bits=1),),
    )
    up, values = contribution_size(setting)
    assert up == pytest.approx(np.mean([len(one.payload) for one in sent]), rel=0.05, abs=400)
    assert values == pytest.approx(np.mean([one.num_values for one in sent]), rel=0.01)
    assert update_size(setting)[0] == pytest.approx(np.mean(updates), rel=0.05, abs=400)


def test_an_update_does_not_grow_with_sites_that_share_k() -> None:
    sizes = [update_size(replace(SETTING, k_sites=4, sites=n))[0] for n in (2, 4, 8, 16, 32)]
    assert sizes[0] < 0.7 * sizes[1]
    assert sizes[1:] == pytest.approx([sizes[1]] * 4, rel=0.1)
    sent = [contribution_size(replace(SETTING, k_sites=4, sites=n))[0] for n in (4, 16)]
    assert 0.2 < sent[1] / sent[0] < 0.4


def test_seconds_are_those_of_the_codecs_rates_and_the_link() -> None:
    """8e9 parameters at 4 sites of 8 ranks, reckoned by hand from the constants' sources."""
    layout = Layout.of([("parameters", (8_000_000_000,))])
    p = predict(
        replace(
            SETTING,
            layout=layout,
            sites=4,
            ranks=8,
            rtt_ms=80.0,
            up_mbit=500.0,
            down_mbit=250.0,
            coordinator_cores=4,
        )
    )
    values, union = 8e9 / 64, 8e9 / 4096 * round(4096 * (1 - (63 / 64) ** 4))
    assert p.dense_bytes == 32_000_000_000
    assert p.encode_seconds == pytest.approx(8e9 / 8 / 854e6, rel=1e-3)
    assert p.apply_seconds == pytest.approx(union / 8 / 46.1e6, rel=1e-3)
    reduce = 8e9 * 1.32e-9 + (2 * 4 * values + union) * 63e-9
    serve = 4 * (8.1e-3 + p.bytes_up * 3.26e-9 + p.bytes_down * 1.41e-9)
    assert p.coordinator_cpu_seconds == pytest.approx(reduce + serve, rel=1e-3)
    assert p.coordinator_seconds == pytest.approx(reduce / 4 + serve, rel=1e-3)
    assert p.up_seconds == pytest.approx(8 * p.bytes_up / 500e6)
    assert p.down_seconds == pytest.approx(8 * p.bytes_down / 250e6)
    slow_start = np.log2(500e6 / 8 * 0.08 / 14600) + np.log2(250e6 / 8 * 0.08 / 14600)
    # upload and directive, and Pull, because the update is too large to come with the directive
    assert p.latency_seconds == pytest.approx((2 + slow_start) * 0.08)
    parts = (
        p.encode_seconds, p.up_seconds, p.coordinator_seconds, p.down_seconds, p.apply_seconds,
        p.latency_seconds,
    )  # fmt: skip
    assert p.exchange_seconds == pytest.approx(sum(parts))
    assert p.utilisation == p.utilisation_blocking
    assert p.utilisation == pytest.approx(60 / (60 + p.exchange_seconds))
    assert p.utilisation_overlapped == 1.0
    assert p.bound_by == "coordinator"


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, "compute"),
        ({"up_mbit": 0.01}, "uplink"),
        ({"down_mbit": 0.01}, "downlink"),
        ({"rtt_ms": 3000.0}, "latency"),
        ({"step_seconds": 1e-5}, "codec"),
        ({"step_seconds": 1e-5, "coordinator_cores": 1}, "coordinator"),
    ],
)
def test_what_bounds_a_round_is_named(changes: dict[str, Any], bound: str) -> None:
    layout = Layout.of([("w", (100_000, 4096))])
    setting = replace(SETTING, layout=layout, up_mbit=1e5, down_mbit=1e5)
    p = predict(replace(setting, **({"ranks": 1, **changes} if changes else {"step_seconds": 9.0})))
    assert p.bound_by == bound


def test_the_coordinators_link_is_shared_by_all_sites() -> None:
    alone = predict(SETTING)
    shared = predict(replace(SETTING, coordinator_mbit=100.0))
    assert shared.up_seconds == pytest.approx(2 * alone.up_seconds)
    assert shared.down_seconds == pytest.approx(2 * alone.down_seconds)


def test_a_delay_hides_the_exchange_less_the_ends_of_inner_steps_at_which_it_goes_on() -> None:
    """Against arithmetic: nothing at 3 steps and below, then a step more for each."""
    setting = replace(SETTING, up_mbit=1.0, down_mbit=1.0, step_seconds=0.1)
    waits = [
        p.round_seconds - p.compute_seconds
        for p in (predict(replace(setting, delay_steps=d)) for d in (0, 3, 5, 30))
    ]
    exchange = predict(setting).exchange_seconds
    assert 0.2 < exchange < 2.7
    assert waits == pytest.approx([exchange, exchange, exchange - 0.2, 0.0])


def test_advice_on_a_delay_says_what_of_encoding_it_does_not_hide() -> None:
    """Encoding hides behind one inner step: here it is longer than that."""
    layout = Layout.of([("w", (100_000, 4096))])
    slow = replace(
        SETTING, layout=layout, ranks=1, step_seconds=0.1, inner_steps=100, up_mbit=500.0
    )
    delay = advice(slow)[0]
    hides = int(delay.split("=")[1].split()[0])
    p = predict(replace(slow, delay_steps=hides))
    assert delay.endswith("but for encoding")
    assert p.round_seconds - p.compute_seconds == pytest.approx(p.encode_seconds - 0.1)


def test_who_follows_the_advice_reaches_what_it_says() -> None:
    thin = replace(SETTING, up_mbit=1.0, down_mbit=1.0, step_seconds=0.1)
    assert predict(thin).utilisation < 0.95
    delay, steps, one_bit, half_k = advice(thin)
    hides = int(delay.split("=")[1].split()[0])
    hidden = predict(replace(thin, delay_steps=hides))
    assert hidden.round_seconds == hidden.compute_seconds
    one_less = predict(replace(thin, delay_steps=hides - 1))
    assert one_less.round_seconds > hidden.round_seconds
    number = int(steps.split("=")[1].split()[0])
    assert predict(replace(thin, inner_steps=number)).utilisation >= 0.95
    assert predict(replace(thin, inner_steps=number - 1)).utilisation < 0.95
    for line, changed in ((one_bit, {"bits": 1}), (half_k, {"k": 32})):
        p = predict(replace(thin, **changed))
        assert f"makes it {p.utilisation:.0%}," in line
        assert f"{p.bytes_up / predict(thin).bytes_up:.0%} of the bytes" in line


def test_slow_start_is_told_from_a_line_that_is_known() -> None:
    """188 kB are four flights of cubic's, one trip more of bbr's; below a flight both are one."""
    far = replace(SETTING, layout=Layout.of([("w", (10_000_000,))]), rtt_ms=100.0)
    slow, quick = predict(far), predict(replace(far, congestion="bbr"))
    assert quick.latency_seconds == pytest.approx(0.1 * (1 + 2))
    assert slow.latency_seconds > 2.5 * quick.latency_seconds
    quick_steps = replace(far, step_seconds=0.1)
    there = replace(quick_steps, congestion="bbr")
    told = [line for line in advice(quick_steps) if "congestion" in line]
    assert len(told) == 1
    assert f"makes it {predict(there).utilisation:.0%}" in told[0]
    assert not any("congestion" in line for line in advice(there))
    near = replace(far, layout=Layout.of([("w", (4096,))]))
    assert predict(near) == predict(replace(near, congestion="bbr"))


def test_a_link_with_room_is_advised_a_denser_contribution() -> None:
    wide = replace(SETTING, up_mbit=1000.0, down_mbit=1000.0)
    line, recipe = advice(wide)
    best = int(line.split("codec.k = ")[1].split()[0])
    assert predict(replace(wide, k=best)).utilisation >= 0.95
    assert "outer.unsent = 'replica'" in recipe
    assert len(advice(replace(wide, unsent="replica"))) == 1, "it is so already"


def test_a_link_without_room_for_a_dense_contribution_is_not_advised_the_replica() -> None:
    """k = 64 fits and 128 does not: what the replica keeps would come to theta too late."""
    large = Layout.of([(f"w.{i}", (300, 4096)) for i in range(46)])
    narrow = replace(SETTING, layout=large, up_mbit=8.0, down_mbit=16.0)
    (line,) = advice(narrow)
    assert line.startswith("nothing: sites compute")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"up_mbit": 0.0}, r"--mbit 0 is out of range: 0\.001 to 1e\+07"),
        ({"step_seconds": float("nan")}, "--step-seconds nan is out of range"),
        ({"delay_steps": 31}, "--delay-steps 31 is out of range: 0 to 30"),
        ({"sites": 0}, "--sites 0 is out of range: 1 to 1000"),
        ({"k": 5000}, "--k 5000 is out of range: 1 to 4096"),
        ({"bits": 4}, "--bits 4 is not known: use 1, 2, or 32 for dense"),
        ({"rtt_ms": -1.0}, "--rtt-ms -1 is out of range"),
        ({"congestion": "reno"}, "--congestion reno is not known: use cubic or bbr"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        predict(replace(SETTING, **changes))


def test_the_command_prints_the_prediction() -> None:
    done = run_loco(
        "plan", "--params", "8e9", "--sites", "4", "--mbit", "500", "--rtt-ms", "80",
        "--step-seconds", "3", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["params"] == 8_000_000_000
    assert printed["advice"]
    table = run_loco("plan", "--params", "8e9", "--mbit", "500", "--step-seconds", "3").stdout
    assert "bound by" in table
    neither = run_loco("plan", "--mbit", "500", "--step-seconds", "3")
    assert (neither.returncode, neither.stdout) == (2, "")
    assert "give either --params, for example 8e9, or --config run.toml" in neither.stderr


def test_a_model_of_ones_own_is_planned_from_its_file(tmp_path: Path) -> None:
    save_parameters(torch.nn.Linear(7, 5), tmp_path / "theta.safetensors")
    (tmp_path / "run.toml").write_text(f'model = "file:{tmp_path}/theta.safetensors"\n')
    done = run_loco(
        "plan", "--config", str(tmp_path / "run.toml"), "--mbit", "9", "--step-seconds", "1",
        "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["params"] == 7 * 5 + 5, done.stderr


def test_a_whole_run_is_the_sum_of_its_rounds(tmp_path: Path) -> None:
    """Three kinds of rounds, each with its own k, against contributions of such k that are encoded.

    The demo's model, k falling from 512 over two rounds, 64 in four more, 2048 in the last two.
    """
    (tmp_path / "run.toml").write_text(
        "[run]\nrounds = 8\n[outer]\nunsent = 'replica'\nbeta = 0.0\n[codec]\nk = 64\n"
        "k_start = 512\nk_ramp_rounds = 2\nk_end = 2048\nk_end_rounds = 2\n"
    )
    done = run_loco(
        "plan", "--config", str(tmp_path / "run.toml"), "--mbit", "9", "--step-seconds", "1",
        "--ranks", "1", "--json",
    )  # fmt: skip
    told = json.loads(done.stdout)
    layout = layout_of_config(Config())
    a = vector(layout, seed=0)
    sent = {k: len(shard_body(a, config_of(codec={"k": k}), layout=layout)) for k in KS_OF_ROUNDS}
    assert told["run"]["rounds"] == len(KS_OF_ROUNDS)
    assert told["run"]["dense_bytes"] == len(KS_OF_ROUNDS) * told["dense_bytes"]
    assert told["run"]["bytes_up"] == pytest.approx(sum(sent[k] for k in KS_OF_ROUNDS), rel=0.05)
    assert told["run"]["bytes_up_densest"] == pytest.approx(sent[2048], rel=0.05)
    assert told["bytes_up"] == pytest.approx(sent[64], rel=0.05), "a round is one of most rounds"
    assert told["run"]["bytes_down"] > told["run"]["bytes_up"]
    table = run_loco(
        "plan", "--config", str(tmp_path / "run.toml"), "--mbit", "9", "--step-seconds", "1"
    ).stdout
    assert "the whole run, 8 rounds:" in table


@pytest.mark.slow
def test_a_real_run_sends_what_was_predicted(tmp_path: Path) -> None:
    """Bytes as the coordinator counted them at its transport, the demo's model, within 15 %."""
    model = {
        "dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 384,
        "seq_len": 32,
    }  # fmt: skip
    rounds = 3
    with Cluster(
        tmp_path,
        run={"rounds": rounds},
        model=model,
        codec={"k": 64, "k_start": 64, "k_ramp_rounds": 1},
        eval={"every_rounds": 0},
    ) as cluster:
        cluster.coordinator()
        status = cluster.finish(cluster.site("paris"), cluster.site("oslo"))
    layout = layout_of_config(Config.model_validate(status["config"]))
    p = predict(replace(SETTING, layout=layout))
    assert p.params == status["params"]
    for site in status["sites"]:
        sent, received = site["bytes_up_by_kind"], site["bytes_down_by_kind"]
        assert sent["contribution"] / rounds == pytest.approx(p.bytes_up, rel=0.15)
        assert received["update"] / rounds == pytest.approx(p.bytes_down, rel=0.15)
        assert received["snapshot"] == pytest.approx(p.snapshot_bytes, rel=0.05)


def test_an_update_names_its_headers() -> None:
    """Two cells, two headers: the body of one value a chunk is small enough to see them."""
    layout = Layout.of([("w", (1025, CHUNK))])
    one = Layout.of([("w", (1024, CHUNK))])
    two, single = (update_size(replace(SETTING, layout=x, k=1, sites=1))[0] for x in (layout, one))
    assert two - single == pytest.approx(HEADER_BYTES + single / 1024, abs=8)


@pytest.mark.parametrize("row", rounds_in(SCALING_FIT), ids=str)
def test_the_coordinator_spent_what_the_plan_says(row: dict[str, Any]) -> None:
    p = load_of(row).round
    assert p.coordinator_cpu_seconds == pytest.approx(row["cpu_seconds_a_round"], rel=0.1)


@pytest.mark.parametrize("name", WAN_RUNS)
def test_the_wan_benchmark_measured_what_the_plan_says(name: str) -> None:
    run = read(name)
    measured = run["methods"]["blocking"]
    p = predict(wan_setting(run))
    assert p.exchange_seconds == pytest.approx(measured["sync_seconds"], rel=0.15)
    assert p.bytes_up == pytest.approx(measured["wire_bytes_up"], rel=0.15)
    assert p.bytes_down == pytest.approx(measured["wire_bytes_down"], rel=0.15)
    assert p.utilisation == pytest.approx(measured["compute_utilisation"], rel=0.15)
