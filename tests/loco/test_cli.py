"""The command line: exit codes, one line for an error, and commands that answer at once.

Compared with: the tree in loco/errors.py, and the modules that a process has loaded. Run alone:
pytest tests/loco/test_cli.py
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import typer

from loco import errors
from loco.cli import run
from loco.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LocoError,
    NonFiniteError,
    PayloadError,
    RefusedError,
    UnreachableError,
)

ERRORS = [
    (LocoError("x"), 1),
    (ConfigError("x"), 2),
    (DataError("x"), 2),
    (RefusedError("x", reason="superseded"), 3),
    (UnreachableError("x"), 4),
    (NonFiniteError("x"), 5),
    (CheckpointError("x"), 1),
    (PayloadError("truncated", "x"), 1),
]


def ended(error: BaseException) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise error

    return run(app, [])


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_is_one_line_and_its_exit_code(
    error: LocoError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(error) == code
    assert capsys.readouterr().err == f"loco: {error}\n"


def test_every_error_of_the_tree_has_its_case_and_its_line_in_the_docstring() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert {type(error) for error, _ in ERRORS} == kinds
    for error, code in ERRORS:
        assert re.search(rf"{type(error).__name__} +exit {code}\b", str(errors.__doc__))


def test_ctrl_c_is_130_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(KeyboardInterrupt()) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        ended(ZeroDivisionError())


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh process has after `statement`."""
    code = f"import sys\n{statement}\nprint(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


HELP = """
import loco.cli, contextlib, io
sys.argv = ["loco", "--help"]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    loco.cli.main()
"""


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        (HELP, {"torch", "numpy", "numba", "grpc", "pydantic"}),
        ("import loco.status", {"torch", "numba"}),
        ("import coordinator.server", {"torch"}),
        ("import loco.codec", {"torch", "numba"}),
    ],
    ids=["help", "status", "coordinator", "codec"],
)
def test_what_must_answer_at_once_loads_nothing_heavy(statement: str, heavy: set[str]) -> None:
    """`import torch` alone takes seconds."""
    assert not loaded_by(statement) & heavy


def test_help_names_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "loco", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for command in ("init", "coordinator", "worker", "status", "export", "demo"):
        assert re.search(rf"^ *{command}\b", done.stdout, re.MULTILINE), command
