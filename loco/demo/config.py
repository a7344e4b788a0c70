"""The config of a demo: the tiny preset, and what the controls change of it."""

from __future__ import annotations

import tomllib
from typing import Any

from loco.config import Config, config_from_dict, preset_text
from loco.data.eras import eras
from loco.errors import ConfigError

ALGORITHMS = ("sparseloco", "diloco", "ddp")
SITE_NAMES = ("paris", "oslo", "austin", "kyoto", "quito", "accra", "perth", "izmir")


def demo_config(
    *, algorithm: str, sites: int, rounds: int | None, seed: int
) -> tuple[Config, list[str]]:
    """The config and the names of the sites that the demo starts.

    Raises:
        ConfigError: names the option that is out of range.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"--algorithm {algorithm!r} is not known: use {', '.join(ALGORITHMS)}")
    if not 1 <= sites <= len(SITE_NAMES):
        raise ConfigError(f"--sites {sites} is out of range: 1 to {len(SITE_NAMES)}")
    raw = tomllib.loads(preset_text("tiny"))
    raw["run"] |= {"name": f"demo-{algorithm}", "seed": seed}
    if rounds is not None:
        raw["run"]["rounds"] = rounds
    names = ["all"] if algorithm == "ddp" else list(SITE_NAMES[:sites])
    raw["quorum"]["min_sites"] = len(names)
    if algorithm == "ddp":
        _one_dense_site(raw, sites)
    else:
        raw["data"]["sites"] = dict(zip(names, eras(sites), strict=True))
    if algorithm == "diloco":
        _dense_diloco(raw)
    return config_from_dict(raw, source="the demo's options"), names


def _dense_diloco(raw: dict[str, Any]) -> None:
    """DiLoCo as published (arXiv 2311.08105): dense, Nesterov 0.9; outer lr 0.7."""
    raw["outer"] |= {"aggregation": "nesterov", "alpha": 0.7, "momentum": 0.9, "beta": 0.0}
    raw["codec"] = {"bits": 32}


def _one_dense_site(raw: dict[str, Any], sites: int) -> None:
    """Data-parallel training: all ranks form one site, which averages gradients every step.

    Its batch is that of all sites together, its text the whole corpus; the outer step then only
    copies its parameters.
    """
    raw["data"]["batch"] *= sites
    raw["data"]["sites"] = {}
    raw["outer"] |= {"aggregation": "mean", "alpha": 1.0, "beta": 0.0}
    raw["codec"] = {"bits": 32}
