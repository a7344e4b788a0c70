"""What torchrun, or a script in its place, tells a process by environment variables."""

from __future__ import annotations

import os

from loco.errors import ConfigError


def number_from(name: str, default: int | None = None) -> int:
    """The number >= 0 in RANK, WORLD_SIZE or one of their kind; `default` where it is not set.

    ConfigError if it is something else, or not set and without a default.
    """
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name} is not set: start the ranks with torchrun, or set it")
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            f"{name}={text!r} in the environment is not possible: it must be a number from 0 on, "
            "as torchrun sets it; unset it outside of a torchrun job"
        )
    return int(text)
