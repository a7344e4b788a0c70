"""Resident memory stays flat however often payloads are read or refused.

Run alone: python -m pytest tests/loco/codec/test_leak.py
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.payloads import HEADER, with_body

from loco import codec
from loco.errors import PayloadError

pytestmark = [
    pytest.mark.usefixtures("active_operations"),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc"),
]
A = np.random.default_rng(0).standard_normal(500).astype(np.float32)
SOUND = codec.encode(A, k=8, chunk=100).payload
BROKEN = with_body(SOUND, SOUND[HEADER:] + b"\0")  # refused after every section was read


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def refuse() -> None:
    with contextlib.suppress(PayloadError):
        codec.decode(BROKEN, 500)


CALLS: dict[str, Callable[[], object]] = {
    "read": lambda: codec.decode(SOUND, 500).values,
    "refused": refuse,
    "encoded": lambda: codec.encode(A, k=8, chunk=100),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_is_flat(name: str) -> None:
    call, num_calls = CALLS[name], 4000
    for _ in range(num_calls):
        call()
    before = resident_bytes()
    for _ in range(num_calls):
        call()
    assert resident_bytes() - before < 60 * num_calls  # half of what the fuzzer's process gained
