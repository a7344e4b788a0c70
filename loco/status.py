"""`loco status`: the coordinator's status document, as a table or as JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loco.errors import UnreachableError
from loco.wire.protocol import PROTOCOL_VERSION, split_address
from loco.wire.refusal import refusal_of
from loco.wire.v1 import coordinator_pb2 as pb
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

Status = dict[str, Any]

_TIMEOUT_SECONDS = 5.0
_REFRESH_SECONDS = 1.0


class StatusClient:
    """Asks one coordinator for its status, as often as wanted."""

    def __init__(self, address: str) -> None:
        """ConfigError if `address` is not HOST:PORT."""
        split_address(address)
        self._address = address
        self._channel = grpc.insecure_channel(address)
        self._stub = pb_grpc.CoordinatorServiceStub(self._channel)

    def fetch(self) -> Status:
        """The status document. Raises UnreachableError or RefusedError."""
        request = pb.StatusRequest(protocol_version=PROTOCOL_VERSION)
        try:
            answer = self._stub.Status(request, timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            refused = refusal_of(error)
            if refused is not None:
                raise refused from None
            raise UnreachableError(
                f"no coordinator answers at {self._address} ({error.code().name.lower()}): "
                "check the address and that it runs"
            ) from None
        document: Status = json.loads(answer.status_json)
        return document

    def close(self) -> None:
        self._channel.close()


def print_json(address: str) -> None:
    print(json.dumps(StatusClient(address).fetch()))


def print_once(address: str) -> None:
    Console().print(render(StatusClient(address).fetch()))


def watch(address: str) -> None:
    """Refresh until Ctrl+C; a coordinator that is away is said and waited for."""
    client = StatusClient(address)
    with Live(render(client.fetch()), auto_refresh=False) as live:
        while True:
            time.sleep(_REFRESH_SECONDS)
            try:
                live.update(render(client.fetch()), refresh=True)
            except UnreachableError as error:
                live.update(Text(str(error), style="red"), refresh=True)


def render(status: Status) -> RenderableType:
    """The document as a headline and a table of sites."""
    last = status["validation"][-1] if status["validation"] else None
    measured = (
        f"validation {last['bits_per_byte']:.3f} bits per byte at round {last['round']}"
        if last
        else "validation not measured yet"
    )
    headline = Text(
        f"run {status['run_id']}: round {status['round']} of {status['rounds']}, "
        f"{status['phase']}; {measured}\n{status['waiting_for']}\n"
        f"sites registered {status['sites_registered']}, alive {status['sites_alive']}, "
        f"included {status['sites_included']}; theta {status['theta_digest'][:16]}"
    )
    table = Table("site", "status", "doing", "round", "tokens", "loss, bits per byte", "up", "down")
    for site in status["sites"]:
        loss = site["train_bits_per_byte"]
        table.add_row(
            f"{site['name']} ({site['ranks']} ranks)",
            site["status"],
            site["phase"],
            str(site["round"]),
            f"{site['tokens']:,}",
            "" if loss is None else f"{loss:.3f}",
            human_bytes(site["bytes_up"]),
            human_bytes(site["bytes_down"]),
        )
    return Group(headline, table)


def human_bytes(count: float) -> str:
    """1234567 -> '1.2 MB' (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
