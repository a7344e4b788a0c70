"""The outer step: how contributions become an update, and how an update changes theta."""

from loco.outer.fragments import FragmentRules, Fragments, num_turns, rules_at
from loco.outer.schedule import GUESS_AFTER_STEPS, alpha_at, k_at, k_of_site, own_step
from loco.outer.step import OuterRules, Piece, apply_update, outer_step, reducing_threads

__all__ = [
    "GUESS_AFTER_STEPS",
    "FragmentRules",
    "Fragments",
    "OuterRules",
    "Piece",
    "alpha_at",
    "apply_update",
    "k_at",
    "k_of_site",
    "num_turns",
    "outer_step",
    "own_step",
    "reducing_threads",
    "rules_at",
]
