"""Options of a worker: what the launcher hands to its ranks is what the user said.

Compared with: the real command-line parser. Run alone: pytest tests/worker/test_options.py
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import typer

from loco.cli import run
from worker.__main__ import app
from worker.options import Options

MINIMAL = Options(
    coordinator="example.org:29400",
    site="paris",
    data=None,
    device="auto",
    patience_seconds=3600.0,
    threads=3,
    metrics=None,
    checkpoint=None,
    checkpoint_every_rounds=10,
    link_mbit=None,
)
FULL = Options(
    coordinator="[::1]:29400",
    site="oslo-2",
    data="my texts/with a space.txt",
    device="cpu",
    patience_seconds=0.5,
    threads=1,
    metrics="127.0.0.1:9500",
    checkpoint=Path("/tmp/check points"),
    checkpoint_every_rounds=3,
    link_mbit=62.5,
    bundle=Path("my certs/oslo-2.pem"),
    insecure=True,
)
# Names of the command line where they differ from those of the field.
FLAGS = {"patience_seconds": "patience"}


def parsed(arguments: list[str]) -> dict[str, object]:
    return typer.main.get_command(app).make_context("worker", arguments).params


@pytest.mark.parametrize("options", [MINIMAL, FULL], ids=["minimal", "full"])
def test_the_arguments_of_options_are_parsed_back_to_them(options: Options) -> None:
    params = parsed(options.arguments())
    for field in fields(Options):
        assert params[FLAGS.get(field.name, field.name)] == getattr(options, field.name), field.name
    assert params["ranks"] is None, "a rank must not start ranks of its own"


def test_every_flag_reaches_the_ranks() -> None:
    """A flag that is new in the command line and not in Options would be lost with --ranks 2."""
    known = {FLAGS.get(field.name, field.name) for field in fields(Options)}
    assert set(parsed(MINIMAL.arguments())) - {"ranks"} == known


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--threads", "0"), ("--patience", "-1"), ("--checkpoint-every-rounds", "0")],
)
def test_an_impossible_number_is_refused_by_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, [*MINIMAL.arguments(), flag, value]) == 2
    assert flag in capsys.readouterr().err
