"""The commands of the library itself; those of the other packages come from there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loco.codec_inspect import inspect


def register(app: typer.Typer) -> None:
    """Add the commands of this package to `loco`."""
    app.command()(init)
    app.command()(status)
    app.command()(demo)
    app.command()(control)
    app.command()(inspect)


def init(
    path: Annotated[Path, typer.Argument(help="File to write, for example run.toml.")],
    preset: Annotated[str, typer.Option(help="tiny (the demo), 125m or 1b.")] = "tiny",
) -> None:
    """Write a commented config to start from."""
    from loco.config import preset_text
    from loco.errors import ConfigError

    text = preset_text(preset)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists already: choose another name") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote {path} (preset {preset}); next: loco coordinator {path} --state ./state")


def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The coordinator.")],
    watch: Annotated[bool, typer.Option(help="Refresh until Ctrl+C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show where a run stands."""
    from loco import status as view

    if as_json:
        view.print_json(address)
    elif watch:
        view.watch(address)
    else:
        view.print_once(address)


def control(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The coordinator.")],
    verb: Annotated[
        str, typer.Argument(help="set, pause, resume, drain, evict, readmit or snapshot.")
    ],
    argument: Annotated[
        str | None, typer.Argument(help="For set KEY=VALUE, for evict and readmit the site.")
    ] = None,
) -> None:
    """Change a running run: it takes effect at the next round boundary, on all sites.

    `set` knows outer.alpha, codec.k and inner.steps.
    """
    from loco.control import control as send

    typer.echo(send(address, verb, argument))


def demo(
    algorithm: Annotated[
        str, typer.Option(help="sparseloco, diloco (dense, Nesterov) or ddp (one dense site).")
    ] = "sparseloco",
    inner: Annotated[
        str, typer.Option(help="Inside a site: scape (the preset's), or dense as its control.")
    ] = "scape",
    sites: Annotated[int, typer.Option(help="Sites, each with an era of its own.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks a site.")] = 2,
    rounds: Annotated[int | None, typer.Option(help="Outer rounds; default: the preset's.")] = None,
    seed: Annotated[int, typer.Option(help="Initial parameters and order of the data.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.")] = False,
) -> None:
    """Train on real text: a coordinator and its sites, as separate processes on this machine."""
    from loco.demo.config import DemoOptions
    from loco.demo.run import run_demo

    options = DemoOptions(
        algorithm=algorithm, inner=inner, sites=sites, ranks=ranks, rounds=rounds, seed=seed
    )
    run_demo(options, as_json=as_json)
