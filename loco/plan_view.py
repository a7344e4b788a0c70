"""`loco plan`: the prediction for a run as a table, or as JSON, without any cluster."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loco.config import Config, load_config
from loco.layout import Layout
from loco.outer import Fragments, k_at
from loco.plan import (
    OwnFragment,
    Prediction,
    Setting,
    WholeRun,
    advice,
    predict,
    whole_run,
)
from loco.status import human_bytes, human_seconds

MAX_PARAMS = 1e13


def layout_of_config(config: Config) -> Layout:
    """The layout that sites of this run will have; built without memory for its parameters.

    ConfigError if `model.hf` cannot be built, or `model.file` not be read, on this machine.
    """
    import torch

    from loco.model import build_model, layout_of
    from loco.model.layout import load_parameters

    if config.model.file:
        return load_parameters(config.model.file)[0]
    untrained = config.model.model_copy(update={"pretrained": False})
    with torch.device("meta"):
        return layout_of(build_model(untrained, seed=config.run.seed))


def setting_of_config(path: Path, setting: Setting) -> Setting:
    """`setting` with model, k, bits and H from a run's config; k is that of most rounds."""
    config = load_config(path)
    layout = layout_of_config(config)
    Fragments(config.outer, layout)  # refuses what the coordinator would
    return replace(
        setting,
        layout=layout,
        k=config.codec.k,
        k_sites=config.codec.k_sites,
        bits=config.codec.bits,
        inner_steps=config.inner.steps,
        fragments=config.outer.fragments,
        delay_steps=config.outer.delay_steps,
        own_fragments=own_fragments(config, config.codec.k),
        unsent=config.outer.unsent,
    )


def rounds_of_config(path: Path, setting: Setting) -> dict[Setting, int]:
    """How many rounds of a run are under which setting: k differs at its begin and end.

    `setting` is what `setting_of_config` made of it.
    """
    config = load_config(path)
    rounds = config.run.rounds
    ks = Counter(k_at(config.codec, round_, rounds) for round_ in range(rounds))
    return {
        replace(setting, k=k, own_fragments=own_fragments(config, k)): num for k, num in ks.items()
    }


def own_fragments(config: Config, k: int) -> tuple[OwnFragment, ...]:
    """The fragments with a turn of their own, their k and bits where all others have `k`."""
    return tuple(
        OwnFragment(
            tensors=frozenset(own.tensors),
            k=own.k or k,
            bits=own.bits or config.codec.bits,
        )
        for own in config.outer.own_fragments.values()
    )


def show(setting: Setting, rounds: dict[Setting, int] | None, *, as_json: bool) -> None:
    """Print what a round costs under `setting`; ConfigError if that cannot be.

    `rounds`, where the run is known, are those of `rounds_of_config`.
    """
    prediction = predict(setting)
    told = advice(setting)
    run = whole_run(rounds) if rounds else None
    if as_json:
        print(json.dumps(document(prediction, run, told)))
    else:
        Console().print(render(setting, prediction, run, told))


def document(prediction: Prediction, run: WholeRun | None, told: list[str]) -> dict[str, Any]:
    """What `--json` prints: the fields of `loco.plan.Prediction`, the run's, and the advice."""
    return {**asdict(prediction), "run": run and asdict(run), "advice": told}


def render(
    setting: Setting, p: Prediction, run: WholeRun | None, told: list[str]
) -> RenderableType:
    """The prediction as a person reads it."""
    bits = "dense fp32" if setting.bits == 32 else f"k = {setting.k} of 4096, {setting.bits} bits"
    head = Text(
        f"{p.params:,} parameters, {setting.sites} sites of {setting.ranks} ranks, {bits}, "
        f"H = {setting.inner_steps}, delay {setting.delay_steps}"
    )
    table = Table("a round", "value", "", box=None, pad_edge=False)
    for name, value, note in _rows(p):
        table.add_row(name, value, note)
    lines = [Text(f"advice: {line}") for line in told]
    if run is not None:
        lines.insert(0, Text(_run_line(run)))
    return Group(head, table, *lines)


def _run_line(run: WholeRun) -> str:
    return (
        f"the whole run, {run.rounds} rounds: {human_bytes(run.bytes_up)} up "
        f"({run.dense_bytes / run.bytes_up:.0f} times less than dense) and "
        f"{human_bytes(run.bytes_down)} down a site; its densest round sends "
        f"{human_bytes(run.bytes_up_densest)}"
    )


def _rows(p: Prediction) -> list[tuple[str, str, str]]:
    down = f"{p.dense_bytes / p.bytes_down:.0f} times less than dense"
    return [
        (
            "up, a site",
            human_bytes(p.bytes_up),
            f"{p.dense_bytes / p.bytes_up:.0f} times less than dense, "
            f"{p.bits_per_value_up:.2f} bits a sent value",
        ),
        ("down, a site", human_bytes(p.bytes_down), down),
        ("down at join", human_bytes(p.snapshot_bytes), "the snapshot, once"),
        ("inner steps", _seconds(p.compute_seconds), ""),
        ("encode", _seconds(p.encode_seconds), "one core a rank"),
        ("upload", _seconds(p.up_seconds), ""),
        ("coordinator", _seconds(p.coordinator_seconds), "reduce on its cores, serve sites on one"),
        ("download", _seconds(p.down_seconds), ""),
        ("apply", _seconds(p.apply_seconds), "one core a rank"),
        ("latency", _seconds(p.latency_seconds), "round trips and TCP's slow start"),
        ("round", _seconds(p.round_seconds), f"bound by {p.bound_by}"),
        ("utilisation", f"{p.utilisation:.1%}", "as asked for"),
        ("blocking", f"{p.utilisation_blocking:.1%}", "no delay: steps wait for the exchange"),
        ("overlapped", f"{p.utilisation_overlapped:.1%}", "outer.delay_steps = H"),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 90 else human_seconds(seconds)
