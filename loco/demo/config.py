"""The config of a demo: the tiny preset, and what the controls change of it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

from loco.config import Config, config_from_dict, preset_text
from loco.data.eras import eras
from loco.errors import ConfigError

ALGORITHMS = ("sparseloco", "diloco", "ddp")
INNER = ("scape", "dense")
SITE_NAMES = ("paris", "oslo", "austin", "kyoto", "quito", "accra", "perth", "izmir")

# Peak inner lr, tuned for each method on the same budget (docs/results/recipe_cpu_2026-11-30.md).
_DENSE_LR = 2e-3
_DILOCO_LR = 8e-4


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The flags of `loco demo`."""

    algorithm: str
    inner: str
    sites: int
    ranks: int
    rounds: int | None
    seed: int


def demo_config(options: DemoOptions) -> tuple[Config, list[str]]:
    """The config and the names of the sites that the demo starts.

    Raises:
        ConfigError: names the option that is out of range.
    """
    _check(options)
    raw = tomllib.loads(preset_text("tiny"))
    raw["run"] |= {"name": f"demo-{options.algorithm}", "seed": options.seed}
    if options.rounds is not None:
        raw["run"]["rounds"] = options.rounds
    names = ["all"] if options.algorithm == "ddp" else list(SITE_NAMES[: options.sites])
    raw["quorum"]["min_sites"] = len(names)
    if options.inner == "dense" or options.algorithm != "sparseloco":
        raw["inner"] |= {"sync": "dense", "lr": _DENSE_LR}
    if options.algorithm == "ddp":
        _one_dense_site(raw, options.sites)
    else:
        raw["data"]["sites"] = dict(zip(names, eras(options.sites), strict=True))
    if options.algorithm == "diloco":
        _dense_diloco(raw)
    return config_from_dict(raw, source="the demo's options"), names


def _check(options: DemoOptions) -> None:
    for flag, value, allowed in (
        ("--algorithm", options.algorithm, ALGORITHMS),
        ("--inner", options.inner, INNER),
    ):
        if value not in allowed:
            raise ConfigError(f"{flag} {value!r} is not known: use {', '.join(allowed)}")
    if not 1 <= options.sites <= len(SITE_NAMES):
        raise ConfigError(f"--sites {options.sites} is out of range: 1 to {len(SITE_NAMES)}")
    if options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks} is not possible: use at least 1")


def _dense_diloco(raw: dict[str, Any]) -> None:
    """DiLoCo as published (arXiv 2311.08105): dense, Nesterov 0.9; outer lr 0.7."""
    raw["outer"] |= {"aggregation": "nesterov", "alpha": 0.7, "momentum": 0.9, "beta": 0.0}
    raw["codec"] = {"bits": 32}
    raw["inner"]["lr"] = _DILOCO_LR


def _one_dense_site(raw: dict[str, Any], sites: int) -> None:
    """Data-parallel training: all ranks form one site, which averages gradients every step.

    Its batch is that of all sites together, its text the whole corpus; the outer step then only
    copies its parameters.
    """
    raw["data"]["batch"] *= sites
    raw["data"]["sites"] = {}
    raw["outer"] |= {"aggregation": "mean", "alpha": 1.0, "beta": 0.0}
    raw["codec"] = {"bits": 32}
