"""`torchrun --nproc-per-node N -m worker --coordinator HOST:PORT --site NAME`."""

import sys

import typer

from loco.cli import run
from worker.cli import worker

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(worker)

if __name__ == "__main__":
    sys.exit(run(app))
