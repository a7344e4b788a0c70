"""What a demo shows while it runs, and the numbers that it ends with."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from loco.config import Config
from loco.demo.config import DemoOptions
from loco.status import Status, human_bytes

_LINE_SECONDS = 5.0
_IDLE_PHASES = ("wait", "push", "pull", "apply", "sync")


@dataclass(frozen=True, kw_only=True)
class SiteResult:
    """One site's part; bytes as the coordinator counted them at its transport."""

    name: str
    ranks: int
    tokens: int
    bytes_up: int
    bytes_down: int
    theta_digest: str
    compute_seconds: float
    encode_seconds: float
    wait_seconds: float
    """Everything that is neither computing, evaluating nor encoding: push, wait, pull, sync."""
    contribution_bytes: int
    """Payload of the last round, all ranks."""
    in_site_bytes_per_step: int
    """What one rank hands to the collectives of its site, the exchange's own included, over the
    inner steps."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `loco demo --json` prints."""

    algorithm: str
    inner: str
    params: int
    rounds: int
    inner_steps: int
    val_bpb_start: float
    val_bpb_end: float
    dense_bytes_per_round: int
    sites: list[SiteResult]
    theta_digest: str
    bits_per_value_up: float | None
    seconds: float
    ddp_bytes_per_round: int
    """Computed, not measured: what averaging gradients between the sites every inner step would
    send per site, by the ring's formula."""


def make_result(config: Config, options: DemoOptions, status: Status, seconds: float) -> Result:
    """From the last status document of a run."""
    measured = status["validation"]
    dense = status["dense_bytes_per_round"]
    return Result(
        algorithm=options.algorithm,
        inner=config.inner.sync,
        params=status["params"],
        rounds=status["round"],
        inner_steps=status["round"] * config.inner.steps,
        val_bpb_start=measured[0]["bits_per_byte"],
        val_bpb_end=measured[-1]["bits_per_byte"],
        dense_bytes_per_round=dense,
        sites=[_site(site) for site in status["sites"]],
        theta_digest=status["theta_digest"],
        bits_per_value_up=status["bits_per_value_up"],
        seconds=round(seconds, 1),
        ddp_bytes_per_round=2 * dense * config.inner.steps * (options.sites - 1) // options.sites,
    )


def _site(site: Status) -> SiteResult:
    spent = site["phase_seconds"]
    return SiteResult(
        name=site["name"],
        ranks=site["ranks"],
        tokens=site["tokens"],
        bytes_up=site["bytes_up"],
        bytes_down=site["bytes_down"],
        theta_digest=site["theta_digest"],
        compute_seconds=round(spent.get("compute", 0.0) + spent.get("eval", 0.0), 1),
        encode_seconds=round(spent.get("encode", 0.0), 1),
        wait_seconds=round(sum(spent.get(phase, 0.0) for phase in _IDLE_PHASES), 1),
        contribution_bytes=site["contribution_bytes"],
        in_site_bytes_per_step=site["in_site_bytes"] // max(1, site["inner_steps"] * site["ranks"]),
    )


class ProgressView:
    """Live progress on stderr: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, config: Config, *, quiet: bool) -> None:
        self._rounds = config.run.rounds
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Progress(
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting (the sites import torch)", total=self._rounds)
        self._said = 0.0

    def __enter__(self) -> ProgressView:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, status: Status) -> None:
        """Take over a new status document."""
        line = _progress_line(status)
        if line:
            self._bar.update(self._task, completed=status["round"], description=line)
        if not self._console.is_terminal and time.monotonic() - self._said > _LINE_SECONDS:
            self._said = time.monotonic()
            self._console.print(f"round {status['round']}/{self._rounds} {line}", highlight=False)


def _progress_line(status: Status) -> str:
    parts = []
    for site in status["sites"]:
        loss = site["train_bits_per_byte"]
        known = "-" if loss is None else f"{loss:.2f} bpb"
        up, down = human_bytes(site["bytes_up"]), human_bytes(site["bytes_down"])
        parts.append(f"{site['name']} {known} up {up} down {down}")
    if status["validation"]:
        parts.append(f"validation {status['validation'][-1]['bits_per_byte']:.2f} bpb")
    return " | ".join(parts)


def print_result(result: Result, *, as_json: bool) -> None:
    """The table at the end, or one JSON object."""
    if as_json:
        print(json.dumps(asdict(result)))
        return
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(
        f"\n{result.algorithm}, {result.inner} sync inside a site: {result.params:,} parameters, "
        f"{result.rounds} rounds of {result.inner_steps // max(1, result.rounds)} inner steps, "
        f"{result.seconds:.0f} s in all\n"
        f"validation: {result.val_bpb_start:.3f} -> {result.val_bpb_end:.3f} bits per byte",
        highlight=False,
    )
    console.print(_traffic_table(result))
    console.print(_time_table(result))
    if result.bits_per_value_up is not None:
        console.print(f"{result.bits_per_value_up:.2f} bits a sent value, headers included")
    same = all(site.theta_digest == result.theta_digest for site in result.sites)
    console.print(
        f"theta {result.theta_digest[:16]} at the coordinator, "
        f"{'the same at every site' if same else 'NOT the same at every site'}",
        highlight=False,
    )


def _traffic_table(result: Result) -> Table:
    dense, rounds = result.dense_bytes_per_round, max(1, result.rounds)
    table = Table("bytes a round", "up", "down", "dense / up", "last contribution", "dense / it")
    for site in result.sites:
        table.add_row(
            site.name,
            human_bytes(site.bytes_up / rounds),
            human_bytes(site.bytes_down / rounds),
            f"{dense * rounds / site.bytes_up:.0f}x",
            human_bytes(site.contribution_bytes),
            f"{dense / max(1, site.contribution_bytes):.0f}x",
        )
    table.add_row("dense fp32 DiLoCo", human_bytes(dense), human_bytes(dense), "1x", "", "")
    if result.ddp_bytes_per_round:
        each = human_bytes(result.ddp_bytes_per_round)
        table.add_row("data parallel (computed)", each, each, "", "", "")
    return table


def _time_table(result: Result) -> Table:
    table = Table(
        "seconds", "computing", "encoding", "waiting", "tokens", "in-site bytes a rank and step"
    )
    for site in result.sites:
        table.add_row(
            f"{site.name} ({site.ranks} ranks)",
            f"{site.compute_seconds:.1f}",
            f"{site.encode_seconds:.1f}",
            f"{site.wait_seconds:.1f}",
            f"{site.tokens:,}",
            f"{human_bytes(site.in_site_bytes_per_step)}, dense "
            f"{human_bytes(_dense_sync(result, site))}",
        )
    return table


def _dense_sync(result: Result, site: SiteResult) -> int:
    """Bytes a rank sends to average fp32 gradients over its site, by the ring's formula."""
    return 2 * result.dense_bytes_per_round * (site.ranks - 1) // site.ranks
