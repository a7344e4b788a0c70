"""From a model to its layout, and from the padded flat buffer back to named tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loco.layout import Layout

if TYPE_CHECKING:
    from torch import nn


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


def unpack(theta: NDArray[np.float32], layout: Layout) -> dict[str, NDArray[np.float32]]:
    """Views of the padded flat buffer [layout.num_elements] as named tensors, without a copy."""
    assert theta.shape == (layout.num_elements,), (theta.shape, layout.num_elements)
    return {p.name: theta[p.start : p.start + p.numel].reshape(p.shape) for p in layout.parameters}
