"""How the codec's kernels are compiled, and three instructions that Numba has no word for.

The instructions are portable LLVM: compare 64 elements into a mask (a handful of vector compares),
count bits, find the lowest bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba as nb
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

Scalar: TypeAlias = Any  # a machine number; what Numba makes of int and float, mypy cannot follow
Patterns = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]
F = TypeVar("F", bound=Callable[..., Any])

_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_I32, 64)


def array(of: Any, ndim: int = 1) -> Any:
    """Type of a contiguous array that is written."""
    return nb.types.Array(of, ndim, "C")


def constant(of: Any, ndim: int = 1) -> Any:
    """Type of a contiguous array that is only read: a writable one fits as well."""
    return nb.types.Array(of, ndim, "C", readonly=True)


def jit(function: F) -> F:
    """Compile for its caller: no GIL, kept in a cache, IEEE arithmetic in the order written."""
    return cast(F, nb.njit(nogil=True, cache=True, error_model="numpy")(function))


def entry(*signatures: tuple[Any, ...]) -> Callable[[F], F]:
    """As `jit`, compiled at once for these types and never again: Python calls it."""
    compiled = nb.njit(list(signatures), nogil=True, cache=True, error_model="numpy")
    return cast(Callable[[F], F], compiled)


def jit_sum(function: F) -> F:
    """As `jit`, but sums may be reordered: for metrics, never for what becomes bytes."""
    return cast(F, nb.njit(nogil=True, cache=True, fastmath={"reassoc"})(function))


def _instruction(function: Callable[..., Any]) -> Callable[..., Scalar]:
    return cast(Callable[..., Scalar], intrinsic(function))


@_instruction
def reach_mask(_typing: Any, patterns: Any, _index: Any, _bound: Any) -> Any:
    """(patterns, index, bound): bit i says whether patterns[index + i], signs dropped, >= bound."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.gep(array.data, [arguments[1]])
        loaded = builder.load(builder.bitcast(address, _VECTOR.as_pointer()), align=4)
        magnitudes = builder.and_(loaded, ir.Constant(_VECTOR, [0x7FFFFFFF] * 64))
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first = builder.insert_element(undefined, arguments[2], ir.Constant(_I32, 0))
        bounds = builder.shuffle_vector(first, undefined, ir.Constant(_VECTOR, [0] * 64))
        return builder.bitcast(builder.icmp_unsigned(">=", magnitudes, bounds), _I64)

    return nb.types.uint64(patterns, nb.types.uint64, nb.types.uint32), generate


@_instruction
def count_bits(_typing: Any, _word: Any) -> Any:
    """(word): how many bits of a uint64 are set."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return nb.types.uint64(nb.types.uint64), generate


@_instruction
def lowest_bit(_typing: Any, _word: Any) -> Any:
    """(word): index of the lowest set bit of a uint64, 64 if there is none."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(_I1, 0))

    return nb.types.uint64(nb.types.uint64), generate
