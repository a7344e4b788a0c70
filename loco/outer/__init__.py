"""The outer step: how contributions become an update, and how an update changes theta."""

from loco.outer.schedule import alpha_at, in_fragment, k_at, k_of_site
from loco.outer.step import OuterRules, Piece, apply_update, outer_step

__all__ = [
    "OuterRules",
    "Piece",
    "alpha_at",
    "apply_update",
    "in_fragment",
    "k_at",
    "k_of_site",
    "outer_step",
]
