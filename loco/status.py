"""`loco status`: the coordinator's status document, as a table or as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loco.errors import UnreachableError
from loco.wire.access import Access, Link
from loco.wire.protocol import PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb

Status = dict[str, Any]

_TIMEOUT_SECONDS = 5.0
_REFRESH_SECONDS = 1.0
_LAST_NOTES = 10
_BAR_LETTERS = 20
_WIDE_COLUMNS = 100
# A letter and a colour for each phase, in the order of a round.
_PHASES = {
    "compute": ("c", "green"),
    "encode": ("e", "magenta"),
    "push": ("p", "yellow"),
    "wait": ("w", "bright_black"),
    "pull": ("l", "blue"),
    "apply": ("a", "cyan"),
    "eval": ("v", "bright_cyan"),
    "sync": ("s", "bright_yellow"),
}


_PLAINTEXT = (
    "\nPLAINTEXT (--insecure): everyone who reaches the coordinator may read and command it"
)


class StatusClient:
    """Asks one coordinator for its status, as often as wanted."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        """ConfigError if `address` is not HOST:PORT; `access` defaults to plaintext on loopback."""
        self._link = Link(address, access or Access())

    def fetch(self) -> Status:
        """The status document. Raises UnreachableError or RefusedError."""
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
        try:
            answer = self._link.stub.Status(request, timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise self._link.failure(error) from None
        document: Status = json.loads(answer.status_json)
        return document

    def close(self) -> None:
        self._link.close()


def print_json(address: str, access: Access) -> None:
    print(json.dumps(StatusClient(address, access).fetch()))


def print_once(address: str, access: Access) -> None:
    console = Console()
    console.print(_shown(console, StatusClient(address, access).fetch()))


def _shown(console: Console, status: Status) -> RenderableType:
    return render(status, wide=console.width >= _WIDE_COLUMNS)


def watch(address: str, access: Access) -> None:
    """Refresh until Ctrl+C; a coordinator that is away is said and waited for."""
    client = StatusClient(address, access)
    client.fetch()  # a wrong address ends here, instead of waiting for ever
    with Live(auto_refresh=False) as live:
        while True:
            try:
                live.update(_shown(live.console, client.fetch()), refresh=True)
            except UnreachableError as error:
                live.update(Text(str(error), style="red"), refresh=True)
            time.sleep(_REFRESH_SECONDS)


def render(status: Status, *, wide: bool) -> RenderableType:
    """The document as a person reads it: headline, sites, what was refused and what happened.

    `wide` is for terminals of at least 100 columns.
    """
    members = [_members(site) for site in status["sites"] if site["members"]]
    return Group(_headline(status), _sites(status, wide=wide), *members, *_last(status))


def _headline(status: Status) -> Text:
    last = status["validation"][-1] if status["validation"] else None
    measured = (
        f"validation {last['bits_per_byte']:.3f} bits per byte at round {last['round']}"
        if last
        else "validation not measured yet"
    )
    held = f" ({status['hold']} by an operator)" if status["hold"] != "none" else ""
    return Text(
        f"run {status['run_id']}: round {status['round']} of {status['rounds']}, "
        f"{status['phase']}{held}{_time_left(status)}; {measured}\n{status['waiting_for']}\n"
        f"{_settings(status)}\n"
        f"sites registered {status['sites_registered']}, alive {status['sites_alive']}, "
        f"included {status['sites_included']}; theta {status['theta_digest'][:16]}"
        f"{_PLAINTEXT if status['plaintext'] else ''}"
    )


def _settings(status: Status) -> str:
    """`alpha 0.6 (an operator's; the config says 1), k 64, to be 128 from round 7 on, H 15`."""
    names = {"outer.alpha": "alpha", "codec.k": "k", "inner.steps": "H"}
    parts = []
    for key, name in names.items():
        found = status["settings"][key]
        part = f"{name} {found['value']:g}"
        if found["ordered"] is not None:
            part += f" (an operator's; the config says {found['configured']:g})"
        if found["pending"] is not None:
            part += f", to be {found['pending']:g} from round {found['pending_round']} on"
        parts.append(part)
    if status["snapshot_due"]:
        parts.append("a snapshot after this round")
    return "; ".join(parts)


def _time_left(status: Status) -> str:
    rounds, each = status["rounds"] - status["round"], status["seconds_a_round"]
    return f", {human_seconds(rounds * each)} left" if rounds and each else ""


def _sites(status: Status, *, wide: bool) -> Table:
    table = Table("site", "doing", "bound by", "time by phase", box=None, pad_edge=False)
    numbers = [
        "round",
        "loss",
        "up",
        "down",
        *(["up, rate", "down, rate", "ranks"] if wide else []),
    ]
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for site in status["sites"]:
        alive = site["status"] in ("syncing", "ready")
        cells = {
            "round": str(site["round"]),
            "loss": _known(site["train_bits_per_byte"], "{:.3f}".format),
            "up": human_bytes(site["bytes_up"]),
            "down": human_bytes(site["bytes_down"]),
            "up, rate": _known(site["goodput_up"], _rate),
            "down, rate": _known(site["goodput_down"], _rate),
            "ranks": _ranks(site),
        }
        table.add_row(
            site["name"],
            site["phase"] if alive else site["status"],
            site["bound"] or "",
            _bar(site["phase_seconds_lately"]),
            *(cells[heading] for heading in numbers),
        )
    return table


def _ranks(site: dict[str, Any]) -> str:
    """`2/3`: so many of the ranks that the site joined with are there."""
    return f"{site['members']}/{site['ranks']}" if site["members"] else str(site["ranks"])


def _members(site: dict[str, Any]) -> Text:
    """What became of a site's ranks, of those that may die and come back."""
    told = (
        f"ranks of {site['name']}: {site['members']} of {site['ranks']} are there, changed "
        f"{site['member_changes']} times; {site['failed_commits']} steps given up, "
        f"{human_bytes(site['healed_bytes'])} taken by new ranks"
    )
    if site["quorums"]:
        told += f", {1e3 * site['quorum_seconds'] / site['quorums']:.1f} ms waited a quorum"
    if site["shard_lost_fraction"]:
        told += f"; {site['shard_lost_fraction']:.0%} of what one rank alone held was lost"
    return Text(told)


def _known(value: float | None, form: Callable[[float], str]) -> str:
    return "" if value is None else form(value)


def _rate(num_bytes: float) -> str:
    return f"{human_bytes(num_bytes)}/s"


def _bar(phase_seconds: dict[str, float]) -> Text:
    """Shares of the last rounds' time, one letter a twentieth: `cccccccccepppwwwwwl`."""
    total = sum(phase_seconds.values())
    bar, done = Text(), 0.0
    for phase, (letter, style) in _PHASES.items():
        begin = round(_BAR_LETTERS * done / total) if total else 0
        done += phase_seconds.get(phase, 0.0)
        end = round(_BAR_LETTERS * done / total) if total else 0
        bar.append(letter * (end - begin), style)
    return bar


def _last(status: Status) -> list[Text]:
    """The last refusals and events, a line each."""
    lines = [
        Text(f"{letter} {phase}  ", style, end="") for phase, (letter, style) in _PHASES.items()
    ]
    lines.append(Text(""))
    told = [(n["at"], f"refused, {n['what']}: {n['message']}") for n in status["refusals"]]
    told += [(n["at"], n["message"]) for n in status["notes"]]
    for at, message in sorted(told, reverse=True)[:_LAST_NOTES]:
        lines.append(Text(f"{time.strftime('%H:%M:%S', time.localtime(at))} {message}"))
    return lines


def human_bytes(count: float) -> str:
    """1234567 -> '1.2 MB' (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(seconds: float) -> str:
    """5430 -> '1.5 h'."""
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}" if unit != "h" else f"{seconds / size:.1f} h"
    return f"{seconds / 86_400:.1f} d"
