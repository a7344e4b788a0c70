"""Several corpora with weights: `mix:0.7*/data/web,0.3*/data/code`.

Which part a sample comes from is a pure function of its number, as everything about the data is, so
that the site's data cursor stays one integer. Samples come in blocks of 1024; in each block every
part has its exact share, in an order of the block's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loco.data.order import permute
from loco.errors import DataError
from loco.tokens import Tokens

PREFIX = "mix:"
BLOCK = 1024  # samples
GRAMMAR = "mix:WEIGHT*CORPUS,WEIGHT*CORPUS,..., for example mix:0.7*/data/web,0.3*/data/code"


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """One corpus of a mixture, or the only one."""

    tokens: Tokens
    weight: float = 1.0


def bytes_per_token(parts: Sequence[Weighted]) -> float:
    """Mean length of a token of the samples that are drawn from `parts`."""
    total = sum(part.weight for part in parts)
    return sum(part.weight * part.tokens.bytes_per_token for part in parts) / total


def check_vocabulary(parts: Sequence[Weighted], vocab_size: int) -> None:
    """Raise DataError if tokens may reach beyond the model's vocabulary."""
    for part in parts:
        if part.tokens.vocab_size > vocab_size:
            raise DataError(
                f"the corpus has tokens up to {part.tokens.vocab_size - 1}, the model knows "
                f"{vocab_size}: set model.vocab_size to at least {part.tokens.vocab_size}, or "
                "prepare the corpus with the model's tokenizer"
            )


def parse_mixture(corpus: str) -> list[tuple[float, str]]:
    """(weight, corpus) of each part; a corpus that is no mixture is the only part of itself.

    DataError says what is not understood.
    """
    if not corpus.startswith(PREFIX):
        return [(1.0, corpus)]
    parts = []
    for text in corpus.removeprefix(PREFIX).split(","):
        weight, star, name = text.partition("*")
        if not star or not name or name.startswith(PREFIX):
            raise DataError(
                f"part {text!r} of corpus {corpus!r} is not understood: write {GRAMMAR}"
            )
        parts.append((_weight(weight, corpus), name))
    return parts


def _weight(text: str, corpus: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 < weight < 1e9:  # false for NaN, too
        raise DataError(
            f"weight {text!r} in corpus {corpus!r} is not a number above 0: write {GRAMMAR}"
        )
    return weight


def shares(weights: Sequence[float]) -> NDArray[np.int64]:
    """Samples of each part in a block: largest remainders, at least one each.  # [parts]

    DataError if a weight is below 1/1024 of all.
    """
    exact = np.asarray(weights, np.float64) / sum(weights) * BLOCK
    whole = np.floor(exact).astype(np.int64)
    rest = np.argsort(whole - exact, kind="stable")[: BLOCK - int(whole.sum())]
    whole[rest] += 1
    if whole.min() < 1:
        raise DataError(
            f"weight {weights[int(whole.argmin())]:g} of a mixture is less than 1/{BLOCK} of all "
            "weights: give that corpus more, or leave it out"
        )
    return whole


def assign(
    samples: NDArray[np.int64], shares_P: NDArray[np.int64], *, seed: int, site: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(part, number of the sample within its part) of each of `samples` [N] of a site.

    Within a part the numbers of the samples of successive blocks follow one another: none is left
    out and none comes twice.
    """
    if len(shares_P) == 1:
        return np.zeros_like(samples), samples
    blocks, slots = np.divmod(samples, BLOCK)
    shuffled = np.empty_like(slots)
    for block in np.unique(blocks):
        rows = blocks == block
        shuffled[rows] = permute(
            slots[rows], BLOCK, seed=seed, site=f"{site}/mixture", epoch=int(block)
        )
    ends = np.cumsum(shares_P)
    part = np.searchsorted(ends, shuffled, side="right")
    within = shuffled - (ends - shares_P)[part]
    return part, blocks * shares_P[part] + within
