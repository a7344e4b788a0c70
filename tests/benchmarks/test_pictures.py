"""The pictures in docs/results against the result files that they are drawn from.

Compared: the hash in each PNG's text with that of a figure drawn now. Run alone:
pytest tests/benchmarks/test_pictures.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from benchmarks import convergence_plot, downlink_plot, scape_plot
from benchmarks.picture import drawn, said, save

RESULTS = Path(__file__).parents[2] / "docs/results"
PICTURES = sorted(RESULTS.glob("*.png"))


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[Path, Any]]:
    mpl.use("Agg")
    yield {
        **convergence_plot.figures(),
        downlink_plot.PICTURE: downlink_plot.figure(),
        scape_plot.PICTURE: scape_plot.figure(),
    }
    plt.close("all")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_shows_the_results_that_are_there(
    picture: Path, figures: dict[Path, Any]
) -> None:
    """`make evidence` draws them again, each by its benchmarks.*_plot."""
    assert said(picture) == drawn(figures[picture])


def test_a_point_that_moved_is_found(tmp_path: Path) -> None:
    figure, ax = plt.subplots()
    (line,) = ax.plot([1, 2, 3], [2.5, 2.25, 2.125], label="DDP")
    save(figure, tmp_path / "curve.png")
    assert said(tmp_path / "curve.png") == drawn(figure)
    line.set_ydata([2.5, 2.25, 2.126])
    assert said(tmp_path / "curve.png") != drawn(figure)
    line.set_ydata([2.5, 2.25, 2.125])
    line.set_label("DiLoCo")
    assert said(tmp_path / "curve.png") != drawn(figure)
    plt.close(figure)


def test_a_picture_of_something_else_is_found(tmp_path: Path) -> None:
    figure, _ = plt.subplots()
    figure.savefig(tmp_path / "other.png")
    with pytest.raises(KeyError):
        said(tmp_path / "other.png")
    plt.close(figure)
