"""Which implementation of the codec's operations runs: NumPy, or Numba after `warm_up`."""

from __future__ import annotations

import importlib
import threading
from typing import Protocol, cast

import numpy as np

from loco.codec import reference
from loco.codec.rice import Bytes, Ints
from loco.codec.selection import Codes, Feedback, Floats, Selection


class Operations(Protocol):
    """What `loco.codec.reference` and `loco.codec.kernels` both are; the former explains it."""

    BLOCK_ELEMENTS: int

    def first_non_finite(self, a: Floats) -> int: ...

    def feedback(
        self,
        theta: Floats,
        params: Floats,
        ef: Floats,
        ks: Ints,
        *,
        beta: np.float32,
        bits: int,
        chunk: int,
    ) -> Feedback: ...

    def select(self, a: Floats, ks: Ints, *, bits: int, chunk: int) -> Selection: ...

    def write_sections(self, selection: Selection) -> tuple[int, dict[str, bytes]]: ...

    def unpack(self, unary: Bytes, fields: Bytes, counts: Ints, rice: Ints) -> Ints: ...

    def place(self, gaps: Ints, counts: Ints, lengths: Ints) -> Codes | None: ...

    def add(
        self, acc: Floats, weight_acc: Floats | None, weight: np.float32, selection: Selection
    ) -> None: ...


_active: Operations = reference

WORTH_COMPILING = 4_000_000  # elements


def operations() -> Operations:
    """The operations in use."""
    return _active


def warm_up() -> str:
    """Switch this process to the compiled operations; returns "numba", or "numpy" without Numba.

    Takes about a second, and about twenty the first time on a machine, when Numba compiles what it
    then keeps in its cache. Nothing else waits for a compiler: until this has been called the NumPy
    operations run, which give the same bytes at a fifth of the speed.
    """
    global _active
    try:
        kernels = importlib.import_module("loco.codec.kernels")
    except ImportError:
        return "numpy"
    _active = cast(Operations, kernels)
    return "numba"


def warm_up_beside(num_elements: int) -> None:
    """`warm_up` in a thread, if the model is large enough to be worth a compiler's time.

    The NumPy operations take 30 ms for a million elements, so that below the threshold a round
    waits less than 0.12 s for them, while the compiler would take cores away from inner steps.
    """
    if num_elements >= WORTH_COMPILING:
        threading.Thread(target=warm_up, name="warm-up", daemon=True).start()
