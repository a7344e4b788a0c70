"""The models that loco trains, and how any model's parameters are laid out."""

from loco.model.build import build_model
from loco.model.layout import bare, check_trainable, layout_of, pack, save_parameters, unpack
from loco.model.llama import Llama

__all__ = [
    "Llama",
    "bare",
    "build_model",
    "check_trainable",
    "layout_of",
    "pack",
    "save_parameters",
    "unpack",
]
