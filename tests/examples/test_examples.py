"""The examples, run as their readers run them, for a single round.

Run alone: pytest tests/examples/test_examples.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from support.cluster import free_port

from loco.data.corpus import speeches
from loco.tokens import load_prepared, read_manifest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_own_text(tmp_path: Path) -> None:
    texts = [str(path) for year, path in speeches() if 1900 <= year < 1908]
    work = tmp_path / "own"
    done = subprocess.run(
        [
            sys.executable, "examples/own_text.py", "--text", *texts, "--work", str(work),
            "--rounds", "1", "--vocab-size", "400", "--port", str(free_port()),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith("The State of the Union")
    assert read_manifest(work / "corpus").vocab_size == 400
    assert 1.5 < load_prepared(work / "corpus", "train").bytes_per_token < 4
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "model")
    text = "Fellow-Citizens: 5¢."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
