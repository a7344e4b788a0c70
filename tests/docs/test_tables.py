"""The numbers in README.md and docs/ against the result files and the code that they come from.

Compared with: what benchmarks.tables generates now. Run alone: pytest tests/docs/test_tables.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.tables import BLOCK, BLOCKS, pages, stale_blocks

ROOT = Path(__file__).parents[2]
PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_number_is_the_one_in_its_source(page: Path) -> None:
    """`python -m benchmarks.tables` makes it so again."""
    assert stale_blocks(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_number_that_was_edited_is_found(page: Path) -> None:
    """The first, the middle and the last digit of each block, one up."""
    text = page.read_text()
    for block in BLOCK.finditer(text):
        inside = range(block.start(3), block.end(3))
        digits = [at for at in inside if text[at].isdigit()]
        for at in (digits[0], digits[len(digits) // 2], digits[-1]):
            edited = f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"
            assert stale_blocks(edited) == [block[2]], text[at - 30 : at + 30]


def test_the_tables_of_the_readme_are_generated() -> None:
    """A table outside a block could say anything."""
    text = (ROOT / "README.md").read_text()
    assert re.search(r"^\|", BLOCK.sub("", text), re.M) is None
    assert {"convergence", "wan"} <= {block[2] for block in BLOCK.finditer(text)}


def test_every_block_is_shown_somewhere() -> None:
    assert {block[2] for page in PAGES for block in BLOCK.finditer(page.read_text())} == set(BLOCKS)
