"""Why a config was refused, in one line: key, value, what is allowed, the nearest known key."""

from __future__ import annotations

import difflib
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def explain(error: ValidationError, source: str, config: type[BaseModel]) -> str:
    """One line: what is wrong in `source`, which should hold a `config`."""
    lines = [_explain_one(detail, config) for detail in error.errors()]
    return f"{source}: " + "; ".join(lines)


def _explain_one(detail: ErrorDetails, config: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in detail["loc"]) or "config"
    if detail["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest(detail['loc'], config)}"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key} = {detail['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(loc: tuple[int | str, ...], section: type[BaseModel]) -> str:
    parts = iter(loc[:-1])
    for part in parts:
        annotation = section.model_fields[str(part)].annotation
        if get_origin(annotation) is dict:
            next(parts)  # a name that the user gave
            annotation = get_args(annotation)[1]
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        section = annotation
    known = list(section.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else f" (known keys: {', '.join(known)})"
