"""The examples, run as their readers run them, for a single round.

Run alone: pytest tests/examples/test_examples.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import transformers
from support.cluster import free_port

from loco.data.corpus import speeches
from loco.tokens import load_prepared, read_manifest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_own_text(tmp_path: Path) -> None:
    """Text, lines of JSON and a parquet file: all that its first lines promise."""
    years = [path for year, path in speeches() if 1900 <= year < 1908]
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": years[0].read_text()}) + "\n")
    table = pyarrow.table({"text": [years[1].read_text()]})
    pyarrow.parquet.write_table(table, tmp_path / "two.parquet")
    texts = list(map(str, [tmp_path / "one.jsonl", tmp_path / "two.parquet", *years[2:]]))
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
