"""The reference pages: what the code says of itself, as Markdown."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

import annotated_types
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from loco import commands
from loco import errors as tree
from loco.config import Config, preset_text

ROOT = Path(__file__).resolve().parents[2]
NOTE = "Written by `make docs` from the code; do not edit."


# --- config ---------------------------------------------------------------------------------------


def config() -> str:
    """reference/config.md: every key of run.toml."""
    parts = [
        "# Config keys",
        "",
        NOTE,
        "`loco init run.toml` writes a commented file to start from. Unknown keys, wrong types and",
        "values out of range are refused before anything starts.",
    ]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        parts += ["", f"## [{name}]", "", *_section(section)]
        for key, inner in _tables(section):
            parts += ["", f"### [{name}.{key}.NAME]", "", *_section(inner)]
    parts += ["", "## A whole file", "", "The preset `tiny`, which is the demo:", ""]
    parts += [f"    {line}".rstrip() for line in preset_text("tiny").splitlines()]
    return "\n".join(parts) + "\n"


def _section(section: type[BaseModel]) -> list[str]:
    said = _field_docstrings(section)
    lines = [_prose(inspect.getdoc(section) or ""), ""] if section.__doc__ else []
    lines += ["| key | type | default | allowed | what |", "| --- | --- | --- | --- | --- |"]
    for key, field in section.model_fields.items():
        kind, allowed = _kind(field)
        cells = f"`{key}`", kind, _default(field), allowed, _prose(said.get(key, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def _tables(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Fields that are tables of sections, under names that the user gives."""
    for key, field in section.model_fields.items():
        for inner in get_args(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield key, inner


def _field_docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The string below each field."""
    (found,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(section))).body
    assert isinstance(found, ast.ClassDef)
    said = {}
    for field, after in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(after.value, ast.Constant)
            said[field.target.id] = str(after.value.value)
    return said


def _kind(field: FieldInfo) -> tuple[str, str]:
    """(type, range) of a field."""
    text = str(field.annotation)
    if text.startswith("<class"):
        text = getattr(field.annotation, "__name__", text)
    choice = re.fullmatch(r"typing\.Literal\[(.+)\]", text)
    if choice:
        return "choice", ", ".join(f"`{c.strip()}`" for c in choice[1].split(","))
    bounds = [_bound(found) for found in _metadata(field)]
    kind = re.sub(r"typing\.|, Field.*?\)|Annotated\[(\w+).*?\]", r"\1", text)
    return _simple(kind), ", ".join(filter(None, bounds))


def _metadata(field: FieldInfo) -> Iterator[Any]:
    for found in field.metadata:
        yield from getattr(found, "metadata", [found])
    for inner in getattr(field.annotation, "__args__", ()):
        for found in getattr(inner, "__metadata__", ()):
            yield from getattr(found, "metadata", [found])


def _bound(found: Any) -> str:
    match found:
        case annotated_types.Ge(ge=value):
            return f">= {value:,}"
        case annotated_types.Gt(gt=value):
            return f"> {value:,}"
        case annotated_types.Le(le=value):
            return f"<= {value:,}"
        case annotated_types.Lt(lt=value):
            return f"< {value:,}"
        case annotated_types.MinLen(min_length=value):
            return f"at least {value} long"
    pattern = getattr(found, "pattern", None)
    return f"`{pattern}`" if pattern else ""


def _simple(kind: str) -> str:
    names = {
        "int": "integer", "float": "number", "bool": "true or false", "str": "text",
        "dict[str, str]": "table of texts", "tuple[float, float]": "two numbers",
    }  # fmt: skip
    if kind in names:
        return names[kind]
    for name in ("int", "float"):
        if kind.startswith((f"{name} |", f"Optional[{name}")):
            return f"{names[name]}, may be left out"
    choice = re.fullmatch(r"Optional\[Literal\[(.+)\]\]", kind)
    if choice:
        return f"one of {choice[1]}, may be left out".replace("'", "`")
    if kind.startswith("dict[int"):
        return "table: number by round"
    if kind.startswith("dict"):
        return "table of tables"
    if kind.startswith("tuple[str"):
        return "texts"
    if kind.startswith("tuple"):
        return "two numbers"
    return kind


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value}`"


# --- command line ---------------------------------------------------------------------------------


def cli() -> str:
    """reference/cli.md: every command with its flags."""
    app = typer.Typer(rich_markup_mode=None)
    commands.register(app)
    for entry in sorted(entry_points(group="loco.commands"), key=lambda e: e.name):
        entry.load()(app)
    root = typer.main.get_command(app)
    parts = ["# Command line", "", NOTE + " `loco COMMAND --help` says the same.", ""]
    parts += [_exit_codes()]
    for name, command in _walk(root, "loco"):
        parts += ["", f"## {name}", "", _prose(command.help or ""), ""]
        rows = [_parameter(p) for p in command.params if p.name != "help"]
        if rows:
            parts += ["| flag | type | default | what |", "| --- | --- | --- | --- |", *rows]
    return "\n".join(parts).rstrip() + "\n"


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for child_name, child in sorted(getattr(command, "commands", {}).items()):
        full = f"{name} {child_name}"
        if getattr(child, "commands", None):
            yield from _walk(child, full)
        else:
            yield full, child


def _parameter(parameter: Any) -> str:
    names = [f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts)]
    if parameter.param_type_name == "argument":
        names = [f"`{parameter.metavar or parameter.name.upper()}`"]
    kind = "switch" if getattr(parameter, "is_flag", False) else _flag_type(parameter)
    default = "required" if parameter.required else ""
    if not parameter.required and parameter.default not in (None, False, ()):
        default = f"`{parameter.default}`"
    said = _prose(getattr(parameter, "help", "") or "")
    if getattr(parameter, "envvar", None):
        said += f" Environment: `{parameter.envvar}`."
    cells = ", ".join(names), kind, default, said
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flag_type(parameter: Any) -> str:
    names = {"Path": "path", "str": "text", "int": "integer", "float": "number"}
    text = str(parameter.type_descriptor.annotation)
    (name,) = re.findall(r"\b(Path|str|int|float)\b", text)[:1]
    return names[name] + (", may be repeated" if "list[" in text else "")


def _exit_codes() -> str:
    return (
        "Every command ends with one of the exit codes of [errors](errors.md), and prints an error "
        "as one line on stderr."
    )


# --- errors ---------------------------------------------------------------------------------------


def errors() -> str:
    """reference/errors.md: exceptions, exit codes, and the coordinator's reasons to refuse."""
    parts = ["# Errors and exit codes", "", NOTE, "", "| exit code | meaning |", "| --- | --- |"]
    meanings = {
        "DONE": "done",
        "FAILED": "a bug, an unforeseen failure, or faults that `check` found",
        "USAGE": "bad usage, config or data",
        "REFUSED": "the coordinator refuses; nothing but a change cures it",
        "UNREACHABLE": "the coordinator did not answer within the patience",
        "NON_FINITE": "training met NaN or infinity",
        "INTERRUPTED": "Ctrl+C or SIGTERM",
    }
    codes = {n.removeprefix("EXIT_"): v for n, v in vars(tree).items() if n.startswith("EXIT_")}
    parts += [f"| {code} | {meanings[name]} |" for name, code in codes.items()]
    parts += ["", "## Exceptions", "", "From `loco.errors`, for programs that use loco:", ""]
    parts += [f"    {line}".rstrip() for line in inspect.cleandoc(tree.__doc__ or "").splitlines()]
    parts += [
        "",
        "## Refusals",
        "",
        "`RefusedError.reason`, and the label `reason` of `loco_rejections_total`:",
        "",
        "| reason | what |",
        "| --- | --- |",
        *(f"| `{name.lower()}` | {said} |" for name, said in _refusals()),
    ]
    return "\n".join(parts) + "\n"


def _refusals() -> Iterator[tuple[str, str]]:
    """(name, its sentences in the .proto)."""
    text = (ROOT / "proto/loco/wire/v1/coordinator.proto").read_text(encoding="utf-8")
    body = text.split("enum RefusalReason {")[1].split("\n}")[0]
    said: list[str] = []
    for line in body.splitlines():
        line = line.strip()
        if line.startswith("//"):
            said.append(line.removeprefix("//").strip())
        elif line:
            name = line.partition(" ")[0].removeprefix("REFUSAL_REASON_")
            if name != "UNSPECIFIED":
                yield name, " ".join(said).replace("|", "\\|")
            said = []


def _prose(text: str) -> str:
    return " ".join(text.split())
