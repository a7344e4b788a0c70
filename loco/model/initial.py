"""Theta of round 0: of the model that the config describes, or from a file."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loco.config import Config
from loco.layout import Layout
from loco.model.build import build_model
from loco.model.layout import layout_of, load_parameters, pack


def initial_parameters(config: Config) -> tuple[Layout, NDArray[np.float32]]:
    """The layout of a new run, and its parameters [layout.num_elements] fp32, padded."""
    if config.model.file:
        return load_parameters(config.model.file)
    model = build_model(config.model, seed=config.run.seed)
    layout = layout_of(model)
    return layout, pack(model, layout)
