"""The commands of the library itself; those of the other packages come from there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loco.certs.cli import certs_app
from loco.codec_inspect import inspect
from loco.data_commands import data_app

Bundle = Annotated[
    Path | None,
    typer.Option(envvar="LOCO_BUNDLE", help="Your certificate and key, from loco certs issue."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Plaintext also beyond this machine.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this package to `loco`."""
    app.command()(init)
    app.command()(status)
    app.command()(demo)
    app.command()(control)
    app.command()(inspect)
    app.command()(plan)
    app.command()(doctor)
    app.add_typer(data_app, name="data", help="Make token files of text, and check them.")
    app.add_typer(certs_app, name="certs", help="Make and revoke the certificates of a run.")


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
    bundle: Bundle = None,
    insecure: Insecure = False,
) -> None:
    """Show where a run stands."""
    from loco import status as view
    from loco.wire.access import Access

    access = Access(bundle=bundle, insecure=insecure)
    if as_json:
        view.print_json(address, access)
    elif watch:
        view.watch(address, access)
    else:
        view.print_once(address, access)


def control(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The coordinator.")],
    verb: Annotated[
        str, typer.Argument(help="set, pause, resume, drain, evict, readmit or snapshot.")
    ],
    argument: Annotated[
        str | None, typer.Argument(help="For set KEY=VALUE, for evict and readmit the site.")
    ] = None,
    bundle: Bundle = None,
    insecure: Insecure = False,
) -> None:
    """Change a running run: it takes effect at the next round boundary, on all sites.

    `set` knows outer.alpha, codec.k and inner.steps.
    """
    from loco.control import control as send
    from loco.wire.access import Access

    typer.echo(send(address, verb, argument, Access(bundle=bundle, insecure=insecure)))


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


def plan(
    mbit: Annotated[float, typer.Option(help="A site's link up, Mbit/s.")],
    step_seconds: Annotated[float, typer.Option(help="Seconds of an inner step, slowest site.")],
    params: Annotated[
        float | None, typer.Option(help="Trainable parameters, for example 8e9.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A run.toml instead: gives parameters, k, bits, H and delay."),
    ] = None,
    sites: Annotated[int, typer.Option(help="Sites of the run.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks a site: they share the coding.")] = 8,
    mbit_down: Annotated[
        float | None, typer.Option(help="A site's link down; default: as up.")
    ] = None,
    coordinator_mbit: Annotated[
        float | None, typer.Option(help="The coordinator's link, which all sites share.")
    ] = None,
    coordinator_cores: Annotated[
        int, typer.Option(help="Its cores: they share the reduction of a large model.")
    ] = 8,
    rtt_ms: Annotated[float, typer.Option(help="Round trip to the coordinator, ms.")] = 50.0,
    congestion: Annotated[
        str, typer.Option(help="TCP's congestion control at both ends: cubic (Linux's) or bbr.")
    ] = "cubic",
    k: Annotated[int, typer.Option(help="Values kept of each chunk of 4096.")] = 64,
    k_sites: Annotated[int, typer.Option(help="Sites that send so many; more share them.")] = 3,
    bits: Annotated[int, typer.Option(help="Bits of a sent value: 1, 2, or 32 for dense.")] = 2,
    steps: Annotated[int, typer.Option(help="H: inner steps a round.")] = 30,
    fragments: Annotated[
        int, typer.Option(help="Rounds in which each chunk is exchanged once.")
    ] = 1,
    delay_steps: Annotated[
        int, typer.Option(help="Inner steps made while the exchange is under way.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Predict bytes, seconds and utilisation of a round, and what to change; no cluster needed."""
    from loco import plan_view
    from loco.errors import ConfigError
    from loco.layout import Layout
    from loco.plan import Setting

    if (params is None) == (config is None):
        raise ConfigError("give either --params, for example 8e9, or --config run.toml")
    if params is not None and not 1 <= params <= plan_view.MAX_PARAMS:
        raise ConfigError(f"--params {params:g} is out of range: 1 to {plan_view.MAX_PARAMS:g}")
    setting = Setting(
        layout=Layout.of([("parameters", (int(params or 0),))]),
        sites=sites,
        ranks=ranks,
        k=k,
        k_sites=k_sites,
        bits=bits,
        inner_steps=steps,
        fragments=fragments,
        delay_steps=delay_steps,
        step_seconds=step_seconds,
        up_mbit=mbit,
        down_mbit=mbit if mbit_down is None else mbit_down,
        coordinator_mbit=coordinator_mbit,
        coordinator_cores=coordinator_cores,
        rtt_ms=rtt_ms,
        congestion=congestion,
    )
    rounds = None
    if config is not None:
        setting = plan_view.setting_of_config(config, setting)
        rounds = plan_view.rounds_of_config(config, setting)
    plan_view.show(setting, rounds, as_json=as_json)


def doctor(
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator.")],
    site: Annotated[str, typer.Option(help="Name that this site will have.")],
    ranks: Annotated[int, typer.Option(help="Ranks that this site will have.")] = 1,
    data: Annotated[
        str | None, typer.Option(help="Corpus to train on, not the config's; validation stays.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Directory of the site's checkpoints, for their room.")
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(help="Seconds of an inner step; default: what sites report.")
    ] = None,
    bundle: Bundle = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check whether this machine can be a site of a run, and predict what a round will cost.

    One line a check: ok, warn or fail, with the remedy. The run itself is not touched. Exit codes:
    0 nothing fails, 3 the coordinator refuses, 4 it cannot be reached, 2 config or data, 1 other.
    """
    from loco.doctor.examine import Options, examine
    from loco.wire.access import Access

    options = Options(
        coordinator=coordinator,
        site=site,
        access=Access(bundle=bundle, insecure=insecure),
        ranks=ranks,
        data=data,
        checkpoint=checkpoint,
        step_seconds=step_seconds,
    )
    raise typer.Exit(examine(options, as_json=as_json))
