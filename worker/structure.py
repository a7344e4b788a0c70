"""A nested state dict as plain JSON and a list of tensors, and back: no pickle needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loco.errors import CheckpointError


def pack_structure(state: Any) -> tuple[Any, list[Tensor]]:
    """JSON-able structure, and the tensors in the order of their places in it.

    Dicts become lists of pairs, because optimizer states have integer keys.

    Raises:
        CheckpointError: the state holds what is neither a tensor nor plain data; names its type.
    """
    tensors: list[Tensor] = []

    def pack(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach().cpu())
            return {"tensor": str(value.dtype), "shape": list(value.shape)}
        if isinstance(value, dict):
            return {"dict": [[key, pack(item)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [pack(item) for item in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CheckpointError(
            f"a state of type {type(value).__name__} cannot be put into a checkpoint"
        )

    return pack(state), tensors


def unpack_structure(structure: Any) -> tuple[Any, list[Tensor]]:
    """The state with empty tensors in it, and those tensors: fill them in place."""
    tensors: list[Tensor] = []

    def unpack(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            dtype = getattr(torch, value["tensor"].removeprefix("torch."))
            tensors.append(torch.empty(value["shape"], dtype=dtype))
            return tensors[-1]
        if "dict" in value:
            return {key: unpack(item) for key, item in value["dict"]}
        if "tuple" in value:
            return tuple(unpack(item) for item in value["tuple"])
        return [unpack(item) for item in value["list"]]

    return unpack(structure), tensors
