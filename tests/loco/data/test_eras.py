"""Eras against the list of speeches: consecutive, complete, of about equal size.

Run alone: pytest tests/loco/data/test_eras.py
"""

from __future__ import annotations

import pytest

from loco.data.corpus import find_pieces
from loco.data.eras import eras


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_eras_cut_the_training_text_in_equal_parts(count: int) -> None:
    parts = [find_pieces(era, "train") for era in eras(count)]
    assert len(parts) == count
    assert [piece for part in parts for piece in part] == find_pieces("sotu", "train")
    sizes = [sum(len(piece) for piece in part) for part in parts]
    assert max(sizes) < 1.25 * min(sizes)


def test_an_era_starts_with_the_first_speech_after_the_one_before() -> None:
    assert eras(2) == ["sotu:1790-1903", "sotu:1904-2026"]
