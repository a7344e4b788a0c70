"""What a check says: one line, and a remedy where something is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    check: str
    state: State
    """`warn`: the site will work, worse than it could; `fail`: it will not."""
    message: str
    remedy: str = ""
    exit_code: int = 1
    """Of the program, if this is the first check that fails."""


def ok(check: str, message: str) -> Finding:
    return Finding(check=check, state="ok", message=message)


def warn(check: str, message: str, remedy: str) -> Finding:
    return Finding(check=check, state="warn", message=message, remedy=remedy)


def fail(check: str, message: str, remedy: str, *, exit_code: int = 1) -> Finding:
    return Finding(check=check, state="fail", message=message, remedy=remedy, exit_code=exit_code)
