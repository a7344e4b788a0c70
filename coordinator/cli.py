"""`loco coordinator` and `loco export`: what works on the coordinator's state directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="The run's config; `loco init` writes one.")]
State = Annotated[Path, typer.Option(help="State directory of the run.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to `loco`."""
    app.command()(coordinator)
    app.command()(export)


def coordinator(
    config: Config,
    state: State,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where sites reach the coordinator.")
    ] = "127.0.0.1:29400",
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where Prometheus scrapes /metrics.")
    ] = None,
) -> None:
    """Serve a run: aggregate the sites' contributions, round after round.

    A state directory that holds the run already is taken up where it stands. SIGTERM or Ctrl+C
    drains and stops; sites wait for the coordinator to come back.
    """
    import asyncio

    from coordinator.server import open_run, serve
    from loco.log import start_logging
    from loco.processes import interrupt_on_sigterm
    from loco.wire.protocol import split_address

    interrupt_on_sigterm()  # until the run is served: from then on both signals drain
    for address in (listen, metrics):
        if address is not None:
            split_address(address)
    start_logging("coordinator")
    asyncio.run(serve(open_run(config, state), listen=listen, metrics=metrics))


def export(
    state: State,
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist or be empty.")],
) -> None:
    """Write theta as a model directory: safetensors, config and tokenizer description."""
    from coordinator.recovery import recover
    from coordinator.store import Store
    from loco.export import export as write_model

    store = Store.open(state)
    try:
        run, reducer = recover(store)
        write_model(reducer.theta, store.layout, store.config.model, out)
    finally:
        store.close()
    size = f"{store.layout.num_parameters:,} parameters"
    typer.echo(f"wrote theta of round {run.round} ({size}) to {out}")
