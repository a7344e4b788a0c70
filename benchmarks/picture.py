"""Pictures that say what is drawn in them: how a test finds one that is older than its results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from PIL import Image

KEY = "Drawn"  # of the PNG's text


def save(figure: Any, path: Path) -> None:
    """Write a PNG with `drawn(figure)` in its text."""
    figure.savefig(path, dpi=110, metadata={KEY: drawn(figure)})


def drawn(figure: Any) -> str:
    """SHA-256 over titles, labels, and the points of every line, to five digits; hex."""
    seen = [
        [ax.get_title(), ax.get_xlabel(), ax.get_ylabel()]
        + [[label(line), *([f"{x:.5g}", f"{y:.5g}"] for x, y in line.get_xydata())]
           for line in ax.get_lines()]
        for ax in figure.get_axes()
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def label(line: Any) -> str:
    """As the legend has it; "" for a line that is not in one."""
    text = str(line.get_label())
    return "" if text.startswith("_") else text


def said(path: Path) -> str:
    """What `save` wrote into the PNG; KeyError where it did not write it."""
    with Image.open(path) as image:
        return str(image.info[KEY])
