"""A short run of the wire's fuzzer, as `make fuzz-wire` makes a long one.

Asserts: every answer is a documented one, no fault of coordinator, good sites or state, and
refusals of many kinds, so that it is not turned away at the door. Run alone:
pytest tests/fuzz/test_fuzz_wire.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.fuzz_wire import fuzz


@pytest.mark.slow
def test_three_thousand_hostile_calls(tmp_path: Path) -> None:
    outcome = fuzz(3000, seed=5, directory=tmp_path)
    assert outcome.undocumented == []
    assert outcome.faults == []
    assert outcome.calls == 3000
    for reason in ("malformed", "role", "identity", "protocol_version", "shard", "not_available"):
        assert outcome.answers[f"refused {reason}"] > 0, outcome.answers
    assert outcome.good_rounds > 0
