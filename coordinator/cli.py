"""`loco coordinator` and `loco export`: what works on the coordinator's state directory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from loco.commands import Bundle, Insecure

Config = Annotated[Path, typer.Argument(help="The run's config; `loco init` writes one.")]
State = Annotated[Path, typer.Option(help="State directory of the run.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to `loco`."""
    app.command()(coordinator)
    app.command()(export)
    app.command()(report)
    app.add_typer(state_app, name="state", help="Look after a state directory.")


def coordinator(
    config: Config,
    state: State,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where sites reach the coordinator.")
    ] = "127.0.0.1:29400",
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where Prometheus scrapes /metrics.")
    ] = None,
    metrics_token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token that lets in to page and metrics.")
    ] = None,
    bundle: Bundle = None,
    insecure: Insecure = False,
) -> None:
    """Serve a run: aggregate the sites' contributions, round after round.

    A state directory that holds the run already is taken up where it stands. SIGTERM or Ctrl+C
    drains and stops; sites wait for the coordinator to come back.
    """
    import asyncio

    from coordinator.addresses import check_free
    from coordinator.files import room_in
    from coordinator.keys import Keys
    from coordinator.server import Where, check_plaintext, open_run, serve
    from loco.log import start_logging
    from loco.processes import give_memory_back, interrupt_on_sigterm

    give_memory_back()
    interrupt_on_sigterm()  # until the run is served: from then on both signals drain
    check_free({"--listen": listen, "--metrics": metrics})
    start_logging("coordinator")
    keys = Keys(bundle) if bundle is not None else None
    where = Where(listen=listen, metrics=metrics, metrics_token=metrics_token, keys=keys)
    check_plaintext(where, insecure=insecure)
    with room_in(state):
        asyncio.run(serve(open_run(config, state), where))


def export(
    state: State,
    out: Annotated[Path, typer.Option(help="Directory to write; must not exist or be empty.")],
    form: Annotated[
        str,
        typer.Option(
            "--format", help="hf: for AutoModelForCausalLM; safetensors: theta alone, own names."
        ),
    ] = "hf",
) -> None:
    """Write theta as a model directory: safetensors, config and tokenizer description."""
    from coordinator.recovery import recover
    from coordinator.store import Store
    from loco.export import export as write_model

    store = Store.open(state)
    try:
        run, reducer = recover(store)
        lacks = write_model(reducer.theta, store.layout, store.config, out, form=form)
    finally:
        store.close()
    size = f"{store.layout.num_parameters:,} parameters"
    typer.echo(f"wrote theta of round {run.round} ({size}) to {out}")
    if lacks:
        typer.echo(lacks, err=True)


def report(
    state: State,
    out: Annotated[Path, typer.Option(help="File to write, for example report.html.")],
) -> None:
    """Write a run's plots as one self-contained page; also while the run goes on."""
    from coordinator.report import write_report

    write_report(state, out)
    typer.echo(f"wrote {out}")


state_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@state_app.callback()
def state_group() -> None:
    """Look after a state directory."""


@state_app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="State directory; no coordinator may use it.")],
    authority: Annotated[
        Path | None,
        typer.Option(help="ca.pem: the history must be signed by a coordinator of it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Verify every file of a run against its digest, and replay the run. Exit code 1 on a fault."""
    from coordinator.check import check_state
    from coordinator.files import room_in
    from loco.certs.authority import read_authority

    with room_in(directory):  # it replays the run on a copy of theta
        verdict = check_state(directory, read_authority(authority) if authority else None)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(verdict)))
    else:
        for fault in verdict.faults:
            typer.echo(f"fault: {fault}")
        snapshots = ", ".join(map(str, verdict.snapshots))
        typer.echo(
            f"round {verdict.round}, theta {verdict.theta_digest[:16]}; checked snapshots of "
            f"rounds {snapshots}, {verdict.events} events, {verdict.contributions} contributions, "
            f"{verdict.updates} updates, {verdict.entries} entries of the chain "
            f"({verdict.signed} signed): {len(verdict.faults)} faults"
        )
    raise typer.Exit(1 if verdict.faults else 0)
