"""`loco`: the command line. Commands of other packages come in through entry points.

Each module that is imported here must stay light: `loco --help` answers in under half a second.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from loco import commands
from loco.processes import die_with_parent, exit_code_of

app = typer.Typer(
    help="Train one language model on several clusters that are far apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run one command; every error that a person can cause ends in one line and an exit code."""
    commands.register(app)
    for entry in sorted(entry_points(group="loco.commands"), key=lambda e: e.name):
        entry.load()(app)
    sys.exit(run(app))


def run(command: typer.Typer, args: list[str] | None = None) -> int:
    """Exit code of a command line, with errors printed as one line."""
    die_with_parent()
    return exit_code_of(lambda: command(args, standalone_mode=True))
