"""Settings of Scape with a name; docs/scape.md tells what each was measured to do."""

from __future__ import annotations

from typing import Any

import torch

PRESETS: dict[str, dict[str, Any]] = {
    # The defaults of Scape, spelled out.
    "default": {
        "betas": (0.0, 0.95),
        "second_moment": "local",
        "refresh": 1,
        "delay": 0,
        "wire_dtype": torch.bfloat16,
    },
    # arXiv 2607.01678: AdamS, a new mask every step that is used one step later, fp32 values.
    "paper": {
        "betas": (0.9, 0.95),
        "second_moment": "momentum",
        "refresh": 1,
        "delay": 1,
        "wire_dtype": torch.float32,
    },
}
PAPER_RAMP = 0.1
"""Share of the run over which the paper's density falls from 1 to its target."""


def preset(name: str, *, total_steps: int) -> dict[str, Any]:
    """Keyword arguments of Scape for a run of `total_steps`; lr and density are the caller's."""
    options = dict(PRESETS[name])
    if name == "paper":
        options["density_ramp_steps"] = round(PAPER_RAMP * total_steps)
    return options
