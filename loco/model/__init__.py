"""The model that loco trains by default, and how any model's parameters are laid out."""

from loco.model.layout import layout_of, pack, unpack
from loco.model.llama import Llama, build_model

__all__ = ["Llama", "build_model", "layout_of", "pack", "unpack"]
