"""Fragments that are exchanged one after the other, at one moment, against one exchange of all.

Compared in every bit of theta, of the sites' EF and of the coordinator's residual, over partitions
of any kind; fragments with rules of their own against exchanges in which those hold for everyone.
Run alone: pytest tests/loco/outer/test_fragments.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loco import codec
from loco.config import CodecConfig, OuterConfig
from loco.errors import ConfigError
from loco.layout import CHUNK, Layout
from loco.outer import Fragments, OuterRules, Piece, num_turns, outer_step, rules_at

Array = np.ndarray[tuple[int], np.dtype[np.float32]]
CODEC = CodecConfig(k=32)


def outer_of(fragments: int = 1, own: Mapping[str, Any] | None = None, **more: Any) -> OuterConfig:
    return OuterConfig.model_validate(
        {"fragments": fragments, "own_fragments": own or {}, "alpha": 0.7, "beta": 0.9, **more}
    )


def layout_of(chunks: Sequence[int]) -> Layout:
    """Tensors t0, t1, ... of so many chunks."""
    return Layout.of((f"t{i}", (n, CHUNK)) for i, n in enumerate(chunks))


class Run:
    """Two sites that stand still at their parameters, and a coordinator."""

    def __init__(self, chunks: Sequence[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.layout = layout_of(chunks)
        self.num_chunks = sum(chunks)

        def some(scale: float) -> Array:
            return np.float32(scale) * rng.standard_normal(self.num_chunks * CHUNK, np.float32)

        self.theta, self.residual = some(1.0), some(1e-4)
        self.params = [self.theta - some(1e-2) for _ in range(2)]
        self.ef = [some(1e-3) for _ in range(2)]

    def exchange(self, outer: OuterConfig, round_: int, of: CodecConfig = CODEC) -> int:
        """One round; returns how many chunks it was about."""
        active = Fragments(outer, self.layout).in_round(range(self.num_chunks), round_)
        own = rules_at(outer, of, round_)
        payloads = [
            codec.encode_fragment(
                self.theta, params, ef, active=active, beta=outer.beta, k=own.k or of.k,
                bits=own.bits,
            ).payload
            for params, ef in zip(self.params, self.ef, strict=True)
        ]  # fmt: skip
        pieces = [
            Piece(start=0, num_elements=self.theta.size, weight=0.5, scale=1.0, payload=payload)
            for payload in payloads
        ]
        rules = OuterRules(
            aggregation=own.aggregation, alpha=outer.alpha, momentum=0.0, bits=own.bits
        )
        outer_step(rules, pieces, theta=self.theta, residual=self.residual, momentum=None)
        return int(active.sum())

    def arrays(self) -> list[Array]:
        return [self.theta, self.residual, *self.ef]

    def bits(self) -> list[bytes]:
        return [a.tobytes() for a in self.arrays()]


@settings(max_examples=20, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    fragments=st.integers(1, 12),
    fragment_of=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    first=st.integers(0, 1000),
    seed=st.integers(0, 2**32 - 1),
)
def test_all_fragments_at_one_moment_are_one_exchange(
    chunks: list[int], fragments: int, fragment_of: list[int], first: int, seed: int
) -> None:
    """Tensor 0 is spread, each of the others too or in one of two fragments of its own."""
    names = {
        f"own{number}": [f"t{i}" for i in range(1, len(chunks)) if fragment_of[i] == number]
        for number in (1, 2)
    }
    own = {name: {"tensors": tensors} for name, tensors in names.items() if tensors}
    outer = outer_of(fragments, own)
    whole, parts = Run(chunks, seed), Run(chunks, seed)
    whole.exchange(outer_of(), first)
    took = {(first + i) % num_turns(outer): parts.exchange(outer, first + i)
            for i in range(num_turns(outer))}  # fmt: skip
    assert sum(took.values()) == sum(chunks)
    spread = [took[turn] for turn in range(fragments)]
    assert max(spread) - min(spread) <= 1  # traffic is even
    of_own = [sum(chunks[int(name[1:])] for name in names[fragment]) for fragment in sorted(own)]
    assert [took[fragments + i] for i in range(len(own))] == of_own
    assert parts.bits() == whole.bits()


def test_an_own_fragment_obeys_its_own_rules_and_the_others_everyones() -> None:
    chunks, seed = (2, 1, 2), 7
    special = {"k": 8, "bits": 1, "aggregation": "mean"}
    mixed = Run(chunks, seed)
    outer = outer_of(2, {"head": {"tensors": ["t1"], **special}})
    for round_ in range(3):
        mixed.exchange(outer, round_)
    everyone, apart = Run(chunks, seed), Run(chunks, seed)
    everyone.exchange(outer_of(), 0)
    apart.exchange(outer_of(aggregation="mean"), 0, of=CodecConfig(k=8, bits=1))
    for found, ours, theirs in zip(mixed.arrays(), everyone.arrays(), apart.arrays(), strict=True):
        rows, wanted = found.reshape(-1, CHUNK), ours.reshape(-1, CHUNK).copy()
        wanted[2] = theirs.reshape(-1, CHUNK)[2]
        np.testing.assert_array_equal(rows, wanted)
        assert (wanted[2] != ours.reshape(-1, CHUNK)[2]).any()


def test_rules_that_an_own_fragment_leaves_out_are_everyones() -> None:
    outer = outer_of(2, {"b": {"tensors": ["t1"]}, "a": {"tensors": ["t0"], "bits": 1}})
    found = [rules_at(outer, CODEC, round_) for round_ in range(8)]
    assert found[:4] == found[4:]
    assert [rules.k for rules in found[:4]] == [None] * 4
    assert [rules.bits for rules in found[:4]] == [2, 2, 1, 2]  # in the order of their names
    assert {rules.aggregation for rules in found} == {"mean_contributors"}


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (["embed"], "own_fragments.head.tensors: the model has no trainable tensor 'embed'"),
        (["t11"], "'t11' (did you mean 't1'?)"),
        (["t0", "t1"], "own_fragments takes all 2 tensors of the model: leave at least one"),
    ],
)
def test_fragments_that_do_not_fit_the_model_are_refused(tensors: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fragments(outer_of(own={"head": {"tensors": tensors}}), layout_of((1, 1)))
    assert told in str(caught.value)


def test_what_is_not_in_the_fragment_stays() -> None:
    run, before = Run((5,), 1), Run((5,), 1)
    assert run.exchange(outer_of(2), 0) == 3
    for now, was in zip(run.arrays(), before.arrays(), strict=True):
        changed = (now != was).reshape(5, CHUNK).any(axis=1)
        np.testing.assert_array_equal(changed, [True, False, True, False, True])


@pytest.mark.parametrize("bits", [1, 2])
def test_a_fragments_payload_is_that_of_its_chunks_in_their_places(bits: int) -> None:
    run, active = Run((4,), 2), np.array([False, True, False, True])
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
