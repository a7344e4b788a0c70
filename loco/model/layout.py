"""From a model to its layout, and from the padded flat buffer back to named tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from loco.errors import ConfigError
from loco.layout import Layout

if TYPE_CHECKING:
    from torch import nn

ORDER = "loco.order"
"""Key of a file's metadata: the names of its tensors in the order of the layout, as JSON."""


def layout_of(model: nn.Module) -> Layout:
    """The layout of the trainable parameters, in the order of `named_parameters`.

    A tied parameter counts once, under its first name; frozen parameters and buffers stay out.
    """
    return Layout.of(
        (name, tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def pack(model: nn.Module, layout: Layout) -> NDArray[np.float32]:
    """Copy of the trainable parameters as the padded flat buffer [layout.num_elements] fp32."""
    theta = np.zeros(layout.num_elements, np.float32)
    named = dict(model.named_parameters())
    for name, view in unpack(theta, layout).items():
        view[...] = named[name].detach().float().cpu().numpy()
    return theta


def save_parameters(model: nn.Module, path: Path | str) -> None:
    """Write the trainable parameters as safetensors: theta of round 0 for `model = "file:PATH"`.

    Names are those of `bare(model)`, tensors fp32. ConfigError if the model cannot be trained here.
    """
    model = bare(model)
    check_trainable(model)
    layout = layout_of(model)
    # The format sorts tensors by name; a layout has the order of the model.
    order = json.dumps([p.name for p in layout.parameters])
    metadata = {"format": "pt", ORDER: order}
    save_file(unpack(pack(model, layout), layout), path, metadata=metadata)


def load_parameters(path: Path | str) -> tuple[Layout, NDArray[np.float32]]:
    """What `save_parameters` wrote: the layout, and theta [layout.num_elements] fp32, padded.

    ConfigError if the file is missing, damaged or holds anything but fp32 tensors.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            names = json.loads((file.metadata() or {})[ORDER])
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the parameters in {path}: {error}") from error
    except KeyError as error:
        raise ConfigError(
            f"{path} does not tell the order of its tensors: write it with loco.save_parameters"
        ) from error
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32:
            raise ConfigError(
                f"{path}: tensor {name} is {tensor.dtype}, parameters are fp32: write the file "
                "with loco.save_parameters"
            )
    layout = Layout.of((name, tensor.shape) for name, tensor in tensors.items())
    theta = np.zeros(layout.num_elements, np.float32)
    for name, view in unpack(theta, layout).items():
        view[...] = tensors[name]
    return layout, theta


def bare(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ == "DistributedDataParallel":
            inner = model.module
        if inner is None:
            return model
        model = inner


_REPLICA = (
    "cannot be exchanged: loco needs a replica on every rank; use DistributedDataParallel, or "
    "loco.inner.Scape, inside a site"
)


def check_trainable(model: nn.Module) -> None:
    """ConfigError unless all trainable parameters are whole, dense fp32 tensors; names the first.

    Sharded ones (DTensor, FSDP) are not supported yet.
    """
    for name, module in model.named_modules():
        # By name: its import takes long, and whoever has wrapped a model has made it already.
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ConfigError(
                f"{name or 'the model'} is wrapped by FullyShardedDataParallel, which {_REPLICA}"
            )
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameters: nothing can be exchanged")
    for name, p in trainable:
        if getattr(p, "_is_flat_param", False):  # of FSDP's first version
            raise ConfigError(f"parameter {name} is a FlatParameter, which {_REPLICA}")
        if hasattr(p, "full_tensor"):
            raise ConfigError(f"parameter {name} is sharded (DTensor), which {_REPLICA}")
        if str(p.dtype) != "torch.float32" or p.layout != _strided():
            raise ConfigError(
                f"parameter {name} is {p.dtype}, {p.layout}; trainable parameters must be dense "
                "torch.float32: keep fp32 masters and use torch.autocast for speed"
            )


def _strided() -> object:
    import torch  # the coordinator reads parameters without it

    return torch.strided


def unpack(theta: NDArray[np.float32], layout: Layout) -> dict[str, NDArray[np.float32]]:
    """Views of the padded flat buffer [layout.num_elements] as named tensors, without a copy."""
    assert theta.shape == (layout.num_elements,), (theta.shape, layout.num_elements)
    return {p.name: theta[p.start : p.start + p.numel].reshape(p.shape) for p in layout.parameters}
