"""The models that loco trains, and how any model's parameters are laid out."""

from loco.model.build import build_model
from loco.model.layout import layout_of, pack, unpack
from loco.model.llama import Llama

__all__ = ["Llama", "build_model", "layout_of", "pack", "unpack"]
