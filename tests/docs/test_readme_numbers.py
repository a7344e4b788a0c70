"""The numbers in README's sentences, outside its generated blocks, against what they are of.

Compared with: result files, defaults of the config, exit codes and pyproject.toml. A digit that
nothing here explains fails. Run alone: pytest tests/docs/test_readme_numbers.py
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.convergence_tables import load
from benchmarks.tables import BLOCK
from loco import errors
from loco.config import CodecConfig
from loco.layout import CHUNK

ROOT = Path(__file__).parents[2]
NAMES = ("arXiv 2508.15706", "arXiv 2407.04480", "TLS 1.3", "averages fp32", "4-bit", "Apache-2.0")
"""Digits that count nothing."""
CODE, TARGET = re.compile(r"^ {4}.*$|`[^`]*`", re.M), re.compile(r"\]\([^)]*\)")


def prose(text: str) -> str:
    """Without generated blocks, code and where links lead; on one line."""
    for pattern in (BLOCK, CODE, TARGET):
        text = pattern.sub(" ", text)
    return " ".join(text.split())


def sayings() -> list[str]:
    """What README says in numbers, as it must be said now."""
    codec = CodecConfig()
    python = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    return [
        f"the {codec.k} largest of every {CHUNK} values, {codec.bits} bits each",
        f"k of {CHUNK} values sent",
        f"Python {python.removeprefix('>=')} or newer",
        f"Exit codes: {errors.EXIT_DONE} done, {errors.EXIT_USAGE} bad usage or config, "
        f"{errors.EXIT_REFUSED} refused by the coordinator, {errors.EXIT_UNREACHABLE} coordinator "
        f"unreachable, {errors.EXIT_NON_FINITE} training failed (non-finite), "
        f"{errors.EXIT_INTERRUPTED} interrupted.",
        f"{times_smaller()} times smaller than the model",
    ]


def times_smaller() -> int:
    """The default k against the model in fp32, of the largest model in the results, in hundreds."""
    runs = [run for run in load() if run["k"] == CodecConfig().k and run["method"] == "sparseloco"]
    largest = max(runs, key=lambda run: run["params"])
    return int(largest["times_smaller_up"]) // 100 * 100


def unexplained(text: str) -> list[str]:
    """Of README's text: sentences that should be there and are not, and digits left over."""
    said = prose(text)
    missing = [saying for saying in sayings() if saying not in said]
    for saying in [*sayings(), *NAMES]:
        said = said.replace(saying, " ")
    return missing + re.findall(r".{0,20}\d.{0,20}", said)


def test_every_number_in_a_sentence_is_the_one_in_its_source() -> None:
    assert unexplained((ROOT / "README.md").read_text()) == []


@pytest.mark.parametrize("saying", [saying for saying in sayings() if saying])
def test_a_number_that_was_edited_is_found(saying: str) -> None:
    """Each digit of each sentence, one up."""
    text = prose((ROOT / "README.md").read_text())
    at = text.index(saying)
    for digit in re.finditer(r"\d", saying):
        place = at + digit.start()
        edited = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
        assert unexplained(edited) != [], edited[at : at + len(saying)]


def test_a_sentence_with_a_new_number_is_found() -> None:
    text = (ROOT / "README.md").read_text()
    assert unexplained(text + "\nloco is 17 times faster.\n") != []


def test_the_demo_takes_no_longer_than_is_said() -> None:
    """The README counts set-up and slow machines; the record is the run alone, on a quick one."""
    assert "two CPU cores and six to ten minutes" in prose((ROOT / "README.md").read_text())
    records = json.loads((ROOT / "docs/results/demo_cpu_2026-11-30.json").read_text())
    (demo,) = (record for record in records if record["command"] in ("make demo", "loco demo"))
    assert demo["seconds"] < 6 * 60
