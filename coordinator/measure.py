"""Figures that need reading files: what the last update looks like, and what the state takes."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coordinator.contributions import read_payloads
from loco import codec
from loco.errors import PayloadError
from loco.layout import CHUNK, Layout


@dataclass(frozen=True, kw_only=True)
class UpdateMeasures:
    """Of one update."""

    norm: float
    num_values: int
    density: float
    """Share of the elements that it changes."""
    bits_per_value: float


def measure_update(path: Path, layout: Layout) -> UpdateMeasures | None:
    """Read an update cell by cell; None when it is not kept any more, or damaged."""
    norm_sq, num_values = 0.0, 0
    try:
        for cell, payload in read_payloads(path, range(layout.num_chunks)):
            values = codec.decode(payload, len(cell) * CHUNK).values
            norm_sq += float(np.dot(values, values))
            num_values += len(values)
        size_bytes = path.stat().st_size
    except (FileNotFoundError, PayloadError):
        return None
    return UpdateMeasures(
        norm=math.sqrt(norm_sq),
        num_values=num_values,
        density=num_values / layout.num_parameters,
        bits_per_value=8 * size_bytes / max(1, num_values),
    )


def support_overlap(values_by_site: list[int], num_union: int) -> float | None:
    """How much sites chose the same coordinates: 0 disjoint, 1 nested; None for fewer than two.

    The most that `num_union` can lie below the sum is all but the largest support.
    """
    most_shared = sum(values_by_site) - max(values_by_site, default=0)
    if most_shared <= 0:
        return None
    return min(1.0, max(0.0, (sum(values_by_site) - num_union) / most_shared))


def directory_bytes(directory: Path) -> int:
    """Bytes of all files below; what disappears while we look does not count."""
    total = 0
    for parent, _, names in os.walk(directory):  # which passes over a directory that is gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
