"""`loco worker --settings FILE`: the table [site] of a TOML file holds what are flags otherwise.

They are of one site only: what all sites must agree on comes from the coordinator at join.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

import typer

from loco.errors import ConfigError

OWN_FLAGS = ("settings", "help")


def use_settings(context: typer.Context, path: Path | None) -> None:
    """Callback of --settings: what [site] holds is the default of its flag; a flag given wins.

    Raises:
        ConfigError: names the file, the key, and what is possible.
    """
    if path is None:
        return
    flags: dict[str, Any] = {str(p.name): p for p in context.command.params}
    flags = {name: flag for name, flag in flags.items() if name not in OWN_FLAGS}
    table = _read(path)
    for key, value in table.items():
        if key not in flags:
            raise ConfigError(f"{path}: [site] {key} is not known{_nearest(key, list(flags))}")
        _check_kind(path, key, value, is_switch=getattr(flags[key], "is_flag", False))
    context.default_map = {**(context.default_map or {}), **table}


def _read(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    if list(document) != ["site"] or not isinstance(document["site"], dict):
        found = ", ".join(document) or "nothing"
        raise ConfigError(f"{path} holds {found}: settings of a site are one table, [site]")
    return document["site"]


def _check_kind(path: Path, key: str, value: Any, *, is_switch: bool) -> None:
    """Whether TOML's kind of value is one that the flag can take; the flag checks its range."""
    wanted = "true or false" if is_switch else "a string or a number"
    kinds = (bool,) if is_switch else (str, int, float)
    if not isinstance(value, kinds) or (isinstance(value, bool) and not is_switch):
        raise ConfigError(f"{path}: [site] {key} = {value!r} is not possible: use {wanted}")


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else f" (known keys: {', '.join(known)})"
