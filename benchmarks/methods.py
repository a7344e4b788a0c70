"""The methods that benchmarks.convergence compares: what each changes in the demo's config.

All start from the tiny preset with AdamW and dense synchronisation inside the sites, so that the
outer loop is what differs; only `scape` and `preset` have the preset's own inner optimizer. Peak
learning rates: what was searched for the small model is in
docs/results/convergence_cpu_2026-11-30.md, for the demo's in docs/lab-log.md. The 3m model, twice
as wide, has half of those; the 125m model has its preset's, which nobody has searched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from benchmarks import domains
from loco.config import Config
from loco.config_errors import explain
from loco.demo.config import DemoOptions, demo_config
from loco.errors import ConfigError

Data = Literal["eras", "iid", "domains"]
"""Of a site: an era of the speeches, all of them, or one domain of three."""

MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "model.dim": 64, "model.num_layers": 2, "model.num_heads": 2, "model.num_kv_heads": 1,
        "model.ffn_dim": 192,
    },
    "demo": {},
    "3m": {
        "model.dim": 256, "model.num_heads": 8, "model.num_kv_heads": 4, "model.ffn_dim": 768,
        "eval.every_rounds": 15,
    },
    "125m": {
        "model.dim": 768, "model.num_layers": 18, "model.num_heads": 12, "model.num_kv_heads": 4,
        "model.ffn_dim": 2304, "model.seq_len": 512, "model.dtype": "bfloat16", "data.batch": 16,
        "inner.warmup_steps": 200, "eval.every_rounds": 15,
    },
}  # fmt: skip
"""Changes to the preset by name: 0.12, 0.82, 3.2 and 124 million parameters. A run of `3m` is eight
minutes of a core. `125m`, the preset of that name with shorter sequences, is for a GPU (`--device
cuda`); none has run it."""

NO_RAMP = {
    "codec.k": 64, "codec.k_start": "none", "codec.k_ramp_rounds": 0, "codec.k_end": "none",
    "codec.k_end_rounds": 0,
}  # fmt: skip
PAPER = {  # arXiv 2508.15706
    **NO_RAMP, "outer.unsent": "feedback", "outer.aggregation": "mean_contributors",
    "outer.beta": 0.95, "outer.alpha": 1.0,
}  # fmt: skip
RECIPE = {**PAPER, "outer.beta": 0.8, "outer.alpha": 1.5}
KEPT = {
    **NO_RAMP, "outer.unsent": "replica", "outer.beta": 0.0, "outer.aggregation": "mean",
    "outer.alpha": 1.0, "codec.k": 512,
}  # fmt: skip
DENSE = {**NO_RAMP, "codec.bits": 32, "outer.unsent": "feedback", "outer.beta": 0.0}
AVERAGED = {**DENSE, "outer.aggregation": "mean", "outer.alpha": 1.0}
NESTEROV = {
    **DENSE, "outer.aggregation": "nesterov", "outer.alpha": 0.7, "outer.momentum": 0.9,
}  # fmt: skip
MUON = {"inner.optimizer": "muon"}
MOMENTUM = {"outer.aggregation": "nesterov", "outer.alpha": 0.7, "outer.momentum": 0.5}


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train several sites together."""

    title: str
    """As a table names it."""
    lr: dict[str, float]
    """Peak inner learning rate by name of the model."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Dotted config keys; "none" stands for None."""
    inner: Literal["dense", "scape"] = "dense"
    runner: Literal["sites", "data_parallel", "torchft", "processes"] = "sites"


SPARSE_LR = {"small": 4e-3, "demo": 2e-3, "3m": 1e-3, "125m": 1e-3}
SCAPE_LR = {name: 2 * lr for name, lr in SPARSE_LR.items()}
KEPT_LR = {"small": 8e-3, "demo": 2e-3, "3m": 1e-3, "125m": 1e-3}
DILOCO_LR = {"small": 2e-3, "demo": 8e-4, "3m": 4e-4, "125m": 4e-4}
MUON_LR = {"small": 1.6e-2, "demo": 2e-3, "3m": 1e-3, "125m": 1e-3}
DENSE_LR = {"small": 4e-3, "demo": 2e-3, "3m": 1e-3, "125m": 1e-3}

METHODS: dict[str, Method] = {
    "ddp": Method(
        title="DDP AdamW, gradients averaged every step",
        lr=DENSE_LR, changes=AVERAGED, runner="data_parallel",
    ),
    "ddp-muon": Method(
        title="DDP with Muon", lr=MUON_LR, changes=AVERAGED | MUON, runner="data_parallel",
    ),
    "localsgd": Method(title="LocalSGD, dense averaging", lr=DENSE_LR, changes=AVERAGED),
    "diloco": Method(title="dense DiLoCo of ours", lr=DILOCO_LR, changes=NESTEROV),
    "diloco-tuned": Method(
        title="dense DiLoCo of ours, momentum 0.5", lr=DENSE_LR,
        changes=NESTEROV | {"outer.momentum": 0.5},
    ),
    "diloco-muon": Method(
        title="dense DiLoCo of ours, momentum 0.5, Muon inside", lr=MUON_LR,
        changes=NESTEROV | MUON | {"outer.momentum": 0.5},
    ),
    "torchft-diloco": Method(
        title="torchft's DiLoCo, real processes", lr=DILOCO_LR, changes=NESTEROV, runner="torchft",
    ),
    "mean": Method(
        title="SparseLoCo, mean of all sites", lr=SPARSE_LR,
        changes={**PAPER, "outer.aggregation": "mean"},
    ),
    "sparseloco": Method(title="SparseLoCo as published", lr=SPARSE_LR, changes=PAPER),
    "recipe": Method(title="SparseLoCo, beta 0.8, alpha 1.5", lr=SPARSE_LR, changes=RECIPE),
    "kept": Method(
        title="SparseLoCo, replicas keep what is unsent", lr=KEPT_LR, changes=KEPT,
    ),
    "kept-5": Method(
        title="SparseLoCo, replicas keep what is unsent, H = 5", lr=KEPT_LR,
        changes=KEPT | {"inner.steps": 5},
    ),
    "kept-5-muon": Method(
        title="SparseLoCo, replicas keep what is unsent, H = 5, Muon inside", lr=MUON_LR,
        changes=KEPT | MUON | {"inner.steps": 5},
    ),
    "kept-momentum": Method(
        title="replicas keep what is unsent, momentum at the coordinator", lr=KEPT_LR,
        changes=KEPT | MOMENTUM,
    ),
    "kept-end": Method(
        title="replicas keep what is unsent, and hand it over at the end", lr=SPARSE_LR,
        changes=KEPT | {"codec.k_end": 2048, "codec.k_end_rounds": 2},
    ),
    "kept-thin": Method(
        title="replicas keep what is unsent, momentum, k = 64, handed over at the end",
        lr=SPARSE_LR,
        changes=KEPT | MOMENTUM
        | {"codec.k": 64, "codec.k_end": 2048, "codec.k_end_rounds": 3},
    ),
    "kept-thin-muon": Method(
        title="replicas keep what is unsent, momentum, k = 64, handed over at the end, Muon inside",
        lr=MUON_LR,
        changes=KEPT | MOMENTUM | MUON
        | {"codec.k": 64, "codec.k_end": 2048, "codec.k_end_rounds": 3},
    ),
    "real": Method(
        title="beta 0.8, alpha 1.5, real processes and sockets", lr=SPARSE_LR, changes=RECIPE,
        runner="processes",
    ),
    "ramp": Method(title="SparseLoCo, the preset's ramp of k", lr=SPARSE_LR),
    "preset": Method(title="the preset as it is: ramp, SCAPE", lr=SCAPE_LR, inner="scape"),
    "overlap": Method(
        title="replicas keep what is unsent, 5 steps of overlap", lr=KEPT_LR,
        changes=KEPT | {"outer.delay_steps": 5},
    ),
    "fragments": Method(
        title="replicas keep what is unsent, chunks take turns by 3, H = 5", lr=KEPT_LR,
        changes=KEPT | {"outer.fragments": 3, "inner.steps": 5},
    ),
    "scape": Method(
        title="replicas keep what is unsent, SCAPE inside the sites", lr=KEPT_LR, changes=KEPT,
        inner="scape",
    ),
    "one-bit": Method(
        title="replicas keep what is unsent, one bit a value", lr=KEPT_LR,
        changes=KEPT | {"codec.bits": 1},
    ),
}  # fmt: skip


def config_of(
    method: Method, *, model: str, sites: int, data: Data, rounds: int | None, seed: int
) -> Config:
    """The config of one run.

    Raises:
        ConfigError: `sites` is out of the demo's range, or not the number of domains.
        DataError: a domain's text is missing and its package is not installed.
    """
    options = DemoOptions(
        algorithm="sparseloco",
        inner=method.inner,
        sites=sites,
        ranks=1,
        rounds=rounds,
        seed=seed,
    )
    base, _ = demo_config(options)
    changes = MODELS[model] | {"inner.lr": method.lr[model]} | method.changes
    if data == "iid":
        changes |= {"data.sites": dict.fromkeys(base.data.sites, base.data.corpus)}
    elif data == "domains":
        changes |= {
            "data.sites": one_domain_each(list(base.data.sites)),
            "data.corpus": str(domains.DIRECTORY),
        }
    return changed(base, changes)


def one_domain_each(sites: list[str]) -> dict[str, str]:
    """Corpora by name of the site; ConfigError unless there are as many sites as domains."""
    if len(sites) != len(domains.DOMAINS):
        raise ConfigError(
            f"{len(sites)} sites cannot have one domain each: use --sites {len(domains.DOMAINS)}"
        )
    return dict(zip(sites, map(str, domains.make()), strict=True))


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """The config with dotted keys replaced; None (TOML has none) is the string "none".

    Raises:
        ConfigError: what comes out is no config.
    """
    raw = config.model_dump()
    for key, value in changes.items():
        section, _, field_ = key.partition(".")
        raw.setdefault(section, {})[field_] = None if value == "none" else value
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, "the changed config", Config)) from None
