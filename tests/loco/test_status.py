"""`loco status` on a terminal: what is in the document is on the screen, at 80 columns and wide.

pytest tests/loco/test_status.py
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.live import Coordinator, Member, coordinating
from support.play import playing
from support.runs import config_of, create_store

from coordinator.events import SettingChanged, SnapshotRequested
from loco.errors import UnreachableError
from loco.status import StatusClient, human_bytes, human_seconds, render
from loco.wire.v1 import coordinator_pb2 as pb


def screen(status: dict[str, Any], columns: int) -> str:
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    console.print(render(status, wide=columns >= 100))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def status(tmp_path: Path) -> dict[str, Any]:
    config = config_of(run={"rounds": 9}, quorum={"min_sites": 2})
    with playing(create_store(tmp_path, config)) as play:
        play.join("oslo")
        play.join("paris")
        play.now += 60
        play.push("oslo")
        play.push("paris")
        for site in ("oslo", "paris"):
            play.monitor.count(site, "up", "contribution", 1_234_567)
            spans = [
                pb.PhaseSpan(phase=pb.SITE_PHASE_COMPUTE, round=0, seconds=15),
                pb.PhaseSpan(phase=pb.SITE_PHASE_PUSH, round=0, seconds=5),
            ]
            play.beat(site, phase=pb.SITE_PHASE_COMPUTE, round=1, spans=spans)
        play.monitor.refused("payload", "shard 0 of 'oslo' is malformed")
        return play.monitor.status(play.state)


def test_every_row_fits_80_columns(status: dict[str, Any]) -> None:
    lines = screen(status, 80).splitlines()
    (paris,) = (line for line in lines if line.startswith("paris"))
    assert paris.split()[1:5] == ["compute", "compute", "c" * 15 + "p" * 5, "1"]
    assert "1.2 MB" in paris


def test_settings_orders_and_what_is_pending_are_on_the_screen(tmp_path: Path) -> None:
    config = config_of(run={"rounds": 9}, quorum={"min_sites": 1})
    with playing(create_store(tmp_path, config)) as play:
        play.join("oslo")
        shown = " ".join(screen(play.monitor.status(play.state), 80).split())
        assert "alpha 1; k 64; H 15" in shown
        play.submit(SettingChanged(key="outer.alpha", value=0.6))
        play.submit(SnapshotRequested())
        shown = " ".join(screen(play.monitor.status(play.state), 80).split())
        assert "alpha 1, to be 0.6 from round 1 on; k 64; H 15; a snapshot after this" in shown
        play.push("oslo")
        shown = " ".join(screen(play.monitor.status(play.state), 80).split())
        assert "alpha 0.6 (an operator's; the config says 1); k 64; H 15" in shown


def test_wide_screens_have_rates_and_ranks_too(status: dict[str, Any]) -> None:
    assert "up, rate" in screen(status, 120)
    assert "up, rate" not in screen(status, 80)


def test_a_site_whose_ranks_come_and_go_has_a_line_of_them(tmp_path: Path) -> None:
    told = pb.Membership(members=2, changes=4, quorums=100, quorum_seconds=0.05)
    told.failed_commits, told.healed_bytes, told.lost_fraction = 3, 2_500_000, 0.25
    with playing(create_store(tmp_path, config_of())) as play:
        play.join("oslo")
        play.join("paris")
        play.beat("oslo", membership=told, ranks=1)
        shown = " ".join(screen(play.monitor.status(play.state), 80).split())
    assert (
        "ranks of oslo: 2 of 1 are there, changed 4 times; 3 steps given up, 2.5 MB taken by new "
        "ranks, 0.5 ms waited a quorum; 25% of what one rank alone held was lost"
    ) in shown
    assert "ranks of paris" not in shown


def test_headline_refusals_and_events(status: dict[str, Any]) -> None:
    text = screen(status, 200)
    assert "round 1 of 9, open" in text
    assert "refused, payload: shard 0 of 'oslo' is malformed" in text
    assert "site oslo joined with 1 shards" in text


def test_numbers_for_people() -> None:
    assert [human_bytes(n) for n in (0, 999, 1234, 5_600_000)] == [
        "0 B",
        "999 B",
        "1.2 kB",
        "5.6 MB",
    ]
    assert [human_seconds(s) for s in (5, 600, 9000, 200_000)] == [
        "5 s",
        "10 min",
        "2.5 h",
        "2.3 d",
    ]


def test_client_gets_the_document_of_a_real_coordinator(tmp_path: Path) -> None:
    with coordinating(create_store(tmp_path, config_of())) as coordinator:
        assert isinstance(coordinator, Coordinator)
        with Member(coordinator, "paris") as paris:
            paris.enter()
            client = StatusClient(coordinator.address)
            document = client.fetch()
            client.close()
    assert document["run_id"] == "test-run"
    assert [site["name"] for site in document["sites"]] == ["paris"]
    assert "paris" in screen(document, 80)


def test_nobody_there_is_said_in_one_line() -> None:
    client = StatusClient("127.0.0.1:1")
    with pytest.raises(UnreachableError, match=r"no coordinator answers at 127\.0\.0\.1:1"):
        client.fetch()
    client.close()


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        (["--help"], {"torch", "numpy", "pydantic", "prometheus_client", "grpc", "aiohttp"}),
        # typer itself imports pydantic when it parses arguments (40 ms)
        (["status", "127.0.0.1:1"], {"torch", "numpy", "loco.config", "prometheus_client"}),
    ],
    ids=["help", "status"],
)
def test_quick_commands_import_nothing_heavy(command: list[str], heavy: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "loco", *command],
        capture_output=True,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert imported & heavy == set()
