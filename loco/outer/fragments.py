"""Which chunks a round exchanges, and by which rules: fragments take turns.

The tensors of each of `outer.own_fragments` are one fragment; the chunks of all others are spread
evenly over `outer.fragments`. All are numbered, the spread ones first, the others by their names,
and round r exchanges fragment r % num_turns(outer).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from loco.errors import ConfigError
from loco.layout import Layout

Aggregation: TypeAlias = Literal["mean_contributors", "mean", "nesterov"]
Bits: TypeAlias = Literal[1, 2, 32]


class Own(Protocol):
    """`[outer.own_fragments.NAME]` of the config, which this package does not import."""

    @property
    def tensors(self) -> Sequence[str]: ...
    @property
    def k(self) -> int | None: ...
    @property
    def bits(self) -> Bits | None: ...
    @property
    def aggregation(self) -> Aggregation | None: ...


class Fragmented(Protocol):
    """`[outer]` of the config, likewise."""

    @property
    def fragments(self) -> int: ...
    @property
    def own_fragments(self) -> Mapping[str, Own]: ...
    @property
    def aggregation(self) -> Aggregation: ...


class Coded(Protocol):
    """`[codec]` of the config, likewise."""

    @property
    def bits(self) -> Bits: ...


@dataclass(frozen=True, kw_only=True)
class FragmentRules:
    """What holds for the fragment of a round."""

    k: int | None
    """Values kept of each chunk; None: those of `codec.k`, its ramp and its operators."""
    bits: Bits
    aggregation: Aggregation


def num_turns(outer: Fragmented) -> int:
    """Rounds in which each chunk is exchanged once."""
    return outer.fragments + len(outer.own_fragments)


def rules_at(outer: Fragmented, codec: Coded, round_: int) -> FragmentRules:
    """The rules of this round's fragment: its own ones, where it has some, before everyone's."""
    turn = round_ % num_turns(outer) - outer.fragments
    if turn < 0:
        return FragmentRules(k=None, bits=codec.bits, aggregation=outer.aggregation)
    own = outer.own_fragments[sorted(outer.own_fragments)[turn]]
    return FragmentRules(
        k=own.k,
        bits=own.bits or codec.bits,
        aggregation=own.aggregation or outer.aggregation,
    )


class Fragments:
    """The fragment of every chunk."""

    def __init__(self, outer: Fragmented, layout: Layout) -> None:
        """ConfigError: an own fragment names a tensor that `layout` lacks, or all are taken."""
        self._turns = num_turns(outer)
        own = np.full(layout.num_chunks, -1)
        for turn, name in enumerate(sorted(outer.own_fragments), start=outer.fragments):
            for tensor in outer.own_fragments[name].tensors:
                own[_rows_of(layout, tensor, name)] = turn
        spread = own < 0
        if outer.own_fragments and not spread.any():
            raise ConfigError(
                f"outer.own_fragments takes all {len(layout.parameters)} tensors of the model: "
                "leave at least one to the rounds of all others"
            )
        own[spread] = np.arange(np.count_nonzero(spread)) % outer.fragments
        self._of_chunk = own  # [num_chunks]

    def in_round(self, rows: range, round_: int) -> npt.NDArray[np.bool_]:
        """Which chunks of `rows` are exchanged in this round.  # [len(rows)]

        Of the chunks that are spread every tensor, rank and round has an even share.
        """
        active: npt.NDArray[np.bool_] = (
            self._of_chunk[rows.start : rows.stop] == round_ % self._turns
        )
        return active


def _rows_of(layout: Layout, tensor: str, fragment: str) -> slice:
    for parameter in layout.parameters:
        if parameter.name == tensor:
            return slice(parameter.first_chunk, parameter.first_chunk + parameter.num_chunks)
    names = [parameter.name for parameter in layout.parameters]
    near = difflib.get_close_matches(tensor, names, n=1, cutoff=0.5)
    raise ConfigError(
        f"outer.own_fragments.{fragment}.tensors: the model has no trainable tensor {tensor!r}"
        + (f" (did you mean {near[0]!r}?)" if near else f" (its first one is {names[0]!r})")
        + "; a tied one has the name of its first use"
    )
