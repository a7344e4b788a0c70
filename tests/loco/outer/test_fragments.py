"""Fragments that are exchanged one after the other, at one moment, against one exchange of all.

Compared in every bit of theta, of the sites' EF and of the coordinator's residual, over any number
of fragments and chunks. Run alone: pytest tests/loco/outer/test_fragments.py
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loco import codec
from loco.layout import CHUNK
from loco.outer import OuterRules, Piece, in_fragment, outer_step

RULES = OuterRules(aggregation="mean_contributors", alpha=0.7, momentum=0.0, bits=2)
Array = np.ndarray[tuple[int], np.dtype[np.float32]]


class Run:
    """Two sites that stand still at their parameters, and a coordinator."""

    def __init__(self, num_chunks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.num_chunks = num_chunks

        def some(scale: float) -> Array:
            return np.float32(scale) * rng.standard_normal(num_chunks * CHUNK, np.float32)

        self.theta, self.residual = some(1.0), some(1e-4)
        self.params = [self.theta - some(1e-2) for _ in range(2)]
        self.ef = [some(1e-3) for _ in range(2)]

    def exchange(self, fragments: int, round_: int) -> int:
        """One round; returns how many chunks it was about."""
        active = in_fragment(range(self.num_chunks), fragments, round_)
        payloads = [
            codec.encode_fragment(
                self.theta, params, ef, active=active, beta=0.9, k=32, bits=2
            ).payload
            for params, ef in zip(self.params, self.ef, strict=True)
        ]
        pieces = [
            Piece(start=0, num_elements=self.theta.size, weight=0.5, scale=1.0, payload=payload)
            for payload in payloads
        ]
        outer_step(RULES, pieces, theta=self.theta, residual=self.residual, momentum=None)
        return int(active.sum())

    def bits(self) -> list[bytes]:
        return [a.tobytes() for a in (self.theta, self.residual, *self.ef)]


@settings(max_examples=20, deadline=None)
@given(
    num_chunks=st.integers(1, 9),
    fragments=st.integers(1, 12),
    first=st.integers(0, 1000),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_fragments_at_one_moment_are_one_exchange(
    num_chunks: int, fragments: int, first: int, seed: int
) -> None:
    whole, parts = Run(num_chunks, seed), Run(num_chunks, seed)
    whole.exchange(1, first)
    took = [parts.exchange(fragments, first + i) for i in range(fragments)]
    assert sum(took) == num_chunks
    assert max(took) - min(took) <= 1  # traffic is even
    assert parts.bits() == whole.bits()


def test_what_is_not_in_the_fragment_stays() -> None:
    run, before = Run(5, 1), Run(5, 1)
    assert run.exchange(2, 0) == 3
    for now, was in zip(
        (run.theta, run.residual, *run.ef), (before.theta, before.residual, *before.ef), strict=True
    ):
        changed = (now != was).reshape(5, CHUNK).any(axis=1)
        np.testing.assert_array_equal(changed, [True, False, True, False, True])


@pytest.mark.parametrize("bits", [1, 2])
def test_a_fragments_payload_is_that_of_its_chunks_in_their_places(bits: int) -> None:
    run, active = Run(4, 2), np.array([False, True, False, True])
    theta, params, ef = run.theta, run.params[0], run.ef[0].copy()
    a = (np.float32(0.9) * ef + (theta - params)).reshape(4, CHUNK)
    encoded = codec.encode_fragment(theta, params, ef, active=active, beta=0.9, k=32, bits=bits)
    wanted = codec.encode(np.where(active[:, None], a, 0), k=32, bits=bits).dense().numpy()
    np.testing.assert_array_equal(codec.decode(encoded.payload, 4 * CHUNK).dense(), wanted)
    left = np.where(active[:, None], a - wanted.reshape(4, CHUNK), run.ef[0].reshape(4, CHUNK))
    np.testing.assert_array_equal(ef.reshape(4, CHUNK), left)
    assert encoded.norm_sq == pytest.approx(float(np.square(ef, dtype=np.float64).sum()))
    encoded.undo(ef)
    np.testing.assert_array_equal(
        ef.reshape(4, CHUNK), np.where(active[:, None], a, run.ef[0].reshape(4, CHUNK))
    )
