"""Encoding must not take longer than what it saves: the slower operations against a fast link.

Seconds of this thread's CPU, the best of several, because other processes only ever add to it.
Speeds against rivals: python -m benchmarks.codec. Run alone: pytest tests/loco/codec/test_speed.py
"""

import time

import numpy as np

from loco import codec

NUM_ELEMENTS = 1 << 20
LINK_BITS_PER_SECOND = 1e9  # more than most sites have between them


def test_encoding_is_faster_than_sending_what_it_saves() -> None:
    """NumPy on one core, with error feedback; another codec of the field needed longer."""
    rng = np.random.default_rng(0)
    theta, params, ef = (rng.standard_normal(NUM_ELEMENTS, dtype=np.float32) for _ in range(3))
    seconds = []
    for _ in range(9):
        began = time.thread_time()
        encoded = codec.encode_feedback(theta, params, ef, k=64)
        seconds.append(time.thread_time() - began)
    saved = 8 * (4 * NUM_ELEMENTS - len(encoded.payload)) / LINK_BITS_PER_SECOND
    assert min(seconds) < saved
