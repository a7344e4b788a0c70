"""All checks in order, printed as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from loco.config import check_site_name
from loco.doctor.findings import Finding
from loco.doctor.machine import check_disk, check_machine
from loco.doctor.run import Run, checkpoint_directory, document
from loco.errors import ConfigError
from loco.wire.access import Access
from loco.wire.protocol import split_address

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of `loco doctor`."""

    coordinator: str
    site: str
    access: Access
    ranks: int
    data: str | None
    checkpoint: Path | None
    step_seconds: float | None


def examine(options: Options, *, as_json: bool) -> int:
    """Print what was found; 0 where nothing fails, else the exit code of the first failure."""
    split_address(options.coordinator)
    check_site_name(options.site)
    if options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks} is not possible: use at least 1")
    run = Run(options.coordinator, options.access, options.site)
    console = Console(quiet=as_json, soft_wrap=True)
    findings = []
    for finding in _all(options, run):
        findings.append(finding)
        console.print(_line(finding), highlight=False)
    if as_json:
        print(json.dumps(document(findings, run)))
    failed = [finding for finding in findings if finding.state == "fail"]
    return failed[0].exit_code if failed else 0


def _all(options: Options, run: Run) -> Iterator[Finding]:
    yield from run.reach()
    yield from check_machine()
    if run.config is None:
        return
    yield from run.check_config(options.data)
    if run.layout is not None:
        where = checkpoint_directory(options.checkpoint)
        yield check_disk(where, run.layout.num_parameters)
    yield from run.predict(options.ranks, options.step_seconds)


def _line(finding: Finding) -> Text:
    remedy = f": {finding.remedy}" if finding.remedy else ""
    text = Text(f"{finding.state:<5}", _STYLES[finding.state])
    text.append(f"{finding.check:<16}{finding.message}{remedy}", "")
    return text
