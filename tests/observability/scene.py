"""A real two-site run with a real Prometheus: the processes, and questions to them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import yaml
from support.certs import Certs
from support.live import eventually
from support.namespaces import HUB, Far, card_bytes, two_hosts
from support.programs import program

from loco.processes import spawn, stop_all

ROOT = Path(__file__).parents[2]
LISTEN, METRICS, PROMETHEUS = f"{HUB}:29400", "127.0.0.1:9400", "127.0.0.1:9090"
SCRAPE_SECONDS = 1.0
ROUNDS = 16
SITES = ("oslo", "paris")
CONFIG = {
    "run": {"name": "watched", "rounds": ROUNDS},
    "model": {"seq_len": 64},
    "data": {"batch": 2},
    "inner": {"steps": 4},
    "codec": {"k": 1024},  # payloads large enough to stand out among headers and heartbeats
    "quorum": {"min_sites": 2, "heartbeat_seconds": 0.5, "dead_after_seconds": 30.0},
    "eval": {"every_rounds": 4, "sequences": 8},
}


@dataclass
class Scene:
    """What the tests look at."""

    directory: Path
    far: Far
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started_at: float = 0.0
    ended_at: float = 0.0
    card_up: int = 0
    card_down: int = 0

    def __post_init__(self) -> None:
        self.certs = Certs(self.directory / "certs", hosts=(HUB,))
        self.operator = ["--bundle", str(self.certs.bundle("ops", role="operator"))]
        """Credentials of `loco status` and `loco control`."""

    # --- questions ------------------------------------------------------------------------------

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{METRICS}/{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.get("status.json"))
        return document

    def ask(self, verb: str, **parameters: str | float) -> list[dict[str, Any]]:
        """The result of a query to Prometheus' API."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://{PROMETHEUS}/api/v1/{verb}?{query}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        result: list[dict[str, Any]] = document["data"]["result"]
        return result

    def over_the_run(self, expr: str) -> list[dict[str, Any]]:
        """The expression at every second of the run, its variables filled in for all sites."""
        return self.ask(
            "query_range",
            query=self.filled(expr),
            start=self.started_at,
            end=self.ended_at,
            step=SCRAPE_SECONDS,
        )

    def at_the_end(self, expr: str) -> list[dict[str, Any]]:
        return self.ask("query", query=self.filled(expr), time=self.ended_at)

    def filled(self, expr: str) -> str:
        """As Grafana fills variables in: everything chosen, the whole run shown."""
        seconds = f"{self.ended_at - self.started_at:.0f}s"
        for name, value in (
            ("$__rate_interval", "60s"),
            ("$__range", seconds),
            ("$instance", ".*"),
            ("$site", ".*"),
        ):
            expr = expr.replace(name, value)
        assert "$" not in expr, expr
        return expr

    # --- processes ------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        config, state = self.directory / "run.toml", self.directory / "state"
        config.write_text(tomli_w.dumps(CONFIG), encoding="utf-8")
        bundle = ["--bundle", str(self.certs.coordinator)]
        where = ["--listen", LISTEN, "--metrics", METRICS, *bundle]
        self._spawn("coordinator", loco("coordinator", str(config), "--state", str(state), *where))
        self.until(lambda: self.get("readyz"), "the coordinator is ready")

    def start_prometheus(self) -> None:
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(ROOT / "deploy/prometheus" / f) for f in config["rule_files"]]
        path = self.directory / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        data = self.directory / "prometheus"
        options = [f"--config.file={path}", f"--storage.tsdb.path={data}"]
        listen = f"--web.listen-address={PROMETHEUS}"
        self._spawn("prometheus", [program("prometheus"), *options, listen])
        self.until(lambda: self.ask("query", query="loco_round"), "Prometheus has scraped")

    def start_sites(self) -> None:
        for site in SITES:
            where = ["--coordinator", LISTEN, "--site", site, "--threads", "1"]
            where += ["--bundle", str(self.certs.bundle(site))]
            link = ["--link-mbit", "100"] if site == "oslo" else []  # paris' link is measured
            self._spawn(site, self.far.command(*loco("worker", *where, *link)))

    def control(self, *arguments: str) -> None:
        subprocess.run(loco("control", LISTEN, *arguments, *self.operator), check=True)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
        """Poll, and fail with the log of a process that has ended badly."""

        def answer() -> Any:
            for name, process in self.processes.items():
                assert not process.poll(), self.log(name)
            with contextlib.suppress(OSError):  # not up yet
                return condition()

        return eventually(answer, what, seconds)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def stop(self, name: str) -> None:
        stop_all([self.processes.pop(name)])

    def _spawn(self, name: str, command: list[str]) -> None:
        environment = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "LOCO_LOG": "json"}
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = spawn(command, environment, stderr=log)


def loco(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "loco", *arguments]


@contextlib.contextmanager
def two_site_run(directory: Path, during: Callable[[Scene], None]) -> Iterator[Scene]:
    """A finished run that was watched; `during` is called in its midst.

    Half way an operator pauses it, changes alpha, and restarts the coordinator.
    """
    assert os.geteuid() == 0
    with two_hosts() as far:
        scene = Scene(directory, far)
        try:
            scene.started_at = time.time()
            scene.start_coordinator()
            scene.start_prometheus()
            scene.start_sites()
            scene.until(lambda: scene.status()["round"] >= 3, "three rounds are done")
            during(scene)
            _operate(scene)
            scene.until(lambda: _all_left(scene), "the run is finished")
            scene.card_up, scene.card_down = card_bytes("rx"), card_bytes("tx")
            # increase() extrapolates by up to 1.5 scrapes: a range of a minute and more, as people
            # look at, keeps that below 3 %; in a run of 20 s alone it was 9 %.
            time.sleep(40 * SCRAPE_SECONDS)
            scene.ended_at = time.time()
            yield scene
        finally:
            stop_all(scene.processes.values())


def _operate(scene: Scene) -> None:
    scene.control("set", "outer.alpha=0.9")
    scene.control("pause")
    scene.until(lambda: scene.status()["phase"] == "gathering", "the run pauses")
    time.sleep(3 * SCRAPE_SECONDS)  # what was counted is scraped before the counters restart
    scene.stop("coordinator")
    scene.start_coordinator()
    scene.control("resume")


def _all_left(scene: Scene) -> bool:
    return all(scene.processes[site].poll() == 0 for site in SITES)
