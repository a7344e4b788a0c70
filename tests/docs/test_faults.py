"""docs/faults.md against the tree: each test that it names exists, and each fault names one.

Compared with: the syntax trees of the test files, so that nothing is imported. Run alone:
pytest tests/docs/test_faults.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
FAULTS = [row for row in ROWS if not row.startswith(("| fault |", "| --- |"))]


def missing(file: str, test: str, case: str) -> str:
    """What is not there of a test's id; empty if all is."""
    path = ROOT / file
    if not path.exists():
        return file
    code = path.read_text(encoding="utf-8")
    found = {node.name for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    if test not in found:
        return f"{file}::{test}"
    golden = [p.stem for p in (ROOT / "tests" / "golden" / "machine").glob("*.txt")]
    known = not case or case in golden or re.search(rf'"{re.escape(case)}"', code)
    return "" if known else f"{file}::{test}[{case}]"


def test_every_test_that_the_page_names_exists() -> None:
    named = ID.findall(PAGE)
    assert len(named) == PAGE.count("`tests/") - 1, "an id that cannot be read"  # 1: this file
    assert [gone for id_ in named if (gone := missing(*id_))] == []


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_fault_has_an_answer_and_a_test(row: str) -> None:
    _, fault, answer, tests, _ = row.split("|")
    assert fault.strip()
    assert answer.strip()
    assert ID.sub("", tests).strip() == ""
    assert ID.findall(tests)


@pytest.mark.parametrize(
    ("file", "test", "case"),
    [
        ("tests/docs/test_gone.py", "test_it", ""),
        ("tests/docs/test_faults.py", "test_of_old", ""),
        ("tests/coordinator/test_transcripts.py", "test_transcript", "of_old"),
    ],
)
def test_what_is_gone_is_found(file: str, test: str, case: str) -> None:
    assert missing(file, test, case)
