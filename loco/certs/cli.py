"""`loco certs`: the private authority of a run, on the command line."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

OPERATOR = "ops"
"""Whose bundle `init` makes beside those of the sites."""

certs_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Directory = Annotated[Path, typer.Option("--dir", help="Directory of the authority.")]
Days = Annotated[int, typer.Option(help="How long it is valid.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="Name or address of the coordinator, as sites write it."),
]


@certs_app.callback()
def certs_group() -> None:
    """Make and revoke the certificates of a run."""


@certs_app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Directory to make.")] = Path("certs"),
    host: Hosts = None,
    site: Annotated[
        list[str] | None, typer.Option(help="Also issue a site's bundle; may be repeated.")
    ] = None,
    days: Days = 30,
) -> None:
    """Make an authority, the coordinator's bundle and an operator's, `ops`."""
    from loco.certs.authority import Authority, check_request
    from loco.certs.identity import COORDINATOR
    from loco.errors import ConfigError

    hosts = host or ["localhost", "127.0.0.1", "::1"]
    check_request(COORDINATOR, role=COORDINATOR, days=days, hosts=hosts)
    for name in site or ():  # all of them first: half an authority could not be made again
        check_request(name, role="site", days=days, hosts=())
        if name == OPERATOR:
            raise ConfigError(f"--site {name} is not possible: {name!r} is the operator's name")
    authority = Authority.create(directory)
    _say(authority.issue(COORDINATOR, role=COORDINATOR, days=days, hosts=hosts), COORDINATOR)
    _say(authority.issue(OPERATOR, role="operator", days=days), f"operator {OPERATOR}")
    for name in site or ():
        _say(authority.issue(name, days=days), f"site {name}")
    typer.echo(
        f"the coordinator is known as {', '.join(hosts)}; keep {directory / 'ca.key'} away from it"
    )


@certs_app.command()
def issue(
    name: Annotated[str, typer.Argument(help="Name of the site, operator or reader.")],
    role: Annotated[str, typer.Option(help="site, operator, reader or coordinator.")] = "site",
    directory: Directory = Path("certs"),
    host: Hosts = None,
    days: Days = 30,
) -> None:
    """Make a bundle, one file to hand over; also to renew one before it ends."""
    from loco.certs.authority import Authority

    path = Authority.open(directory).issue(name, role=role, days=days, hosts=host or ())
    _say(path, role if role == name else f"{role} {name}")


@certs_app.command()
def renew(
    within_days: Annotated[
        float, typer.Option(min=0.0, help="Renew what ends within so many days.")
    ] = 10.0,
    directory: Directory = Path("certs"),
) -> None:
    """Make the bundles anew that end soon, of every name but those revoked; for a daily timer."""
    from loco.certs.authority import Authority

    for path in Authority.open(directory).renew(within_days):
        typer.echo(f"renewed {path}")


@certs_app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name, or serial number of one certificate.")],
    directory: Directory = Path("certs"),
) -> None:
    """Have the coordinator refuse a certificate from now on."""
    from loco.certs.authority import Authority

    serials = Authority.open(directory).revoke(name)
    typer.echo(
        f"revoked {name} ({', '.join(serials)}); a coordinator that reads another copy of "
        f"{directory / 'revoked.pem'} needs the new one"
    )


@certs_app.command("list")
def list_(
    directory: Directory = Path("certs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
) -> None:
    """Show what was issued, and when it ends."""
    from loco.certs.authority import Authority
    from loco.certs.identity import when

    now = time.time()
    issued = Authority.open(directory).issued
    if as_json:
        typer.echo(json.dumps([asdict(entry) | {"state": entry.state(now)} for entry in issued]))
        return
    for entry in issued:
        days = (entry.not_after - now) / 86_400
        left = f"{days:.0f} days left" if entry.state(now) == "valid" else entry.state(now)
        typer.echo(
            f"{entry.name:<20} {entry.role:<12} until {when(entry.not_after)}  {left:<14} "
            f"{entry.serial}"
        )


def _say(path: Path, for_whom: str) -> None:
    typer.echo(f"wrote {path}: whoever holds it is the {for_whom}")
