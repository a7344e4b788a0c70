"""What deploy/compose starts, started as processes: commands, certificates, probe and scrape.

There is no Docker engine where the tests run, so volumes become directories, service names
localhost, and user ids are left alone. Run alone: pytest tests/deploy/test_compose.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster import Process, free_port
from support.live import eventually
from support.programs import program

from loco.certs.authority import Authority, read_revoked
from loco.certs.bundle import read_bundle

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose"
SECONDS = 110.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Machine:
    """The services of compose.yaml with their paths and addresses on this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ports = {port: free_port() for port in ("29400", "9400", "9090")}
        self._services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
        for volume in (v for s in self._services.values() for v in s.get("volumes", [])):
            if not volume.startswith("."):
                (root / volume.partition(":")[0]).mkdir(exist_ok=True)
        self._running: list[Process] = []

    def service(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._services[name]
        return found

    def here(self, name: str, text: str) -> str:
        """`text` of a service with the places of this machine."""
        for volume in self.service(name).get("volumes", []):
            source, target = volume.split(":")[:2]
            place = (COMPOSE / source).resolve() if source.startswith(".") else self.root / source
            text = re.sub(rf"(?<![\w/-]){re.escape(target)}(?=[/\s\"]|$)", str(place), text)
        for port, ours in self.ports.items():
            text = text.replace(f"0.0.0.0:{port}", f"0.0.0.0:{ours}")
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{ours}")
            text = text.replace(f"coordinator:{port}", f"localhost:{ours}")
        return text.replace("$$", "$")

    def start(self, name: str) -> Process:
        command = [self.here(name, argument) for argument in self.service(name)["command"]]
        process = Process(
            self.root / f"{name}.log",
            [sys.executable, "-m", "loco", *command],
            LOCO_CACHE_DIR=str(self.root / "cache"),
            GLOO_SOCKET_IFNAME="lo",
        )
        self._running.append(process)
        return process

    def make_certificates(self) -> None:
        """One start of the service `certs`."""
        *shell, script = self.service("certs")["entrypoint"]
        bundles = {
            f"/bundles/{name}": str(self.root / f"bundle-{name}")
            for name in ("coordinator", "prometheus", "paris", "oslo")
        }
        text = self.here("certs", script)
        for target, place in bundles.items():
            text = text.replace(target, place)
        text = text.replace("/bundles/$name", f"{self.root}/bundle-$name")
        text = text.replace(' -o "$4"', "")  # user ids are left alone
        text = text.replace("loco certs", f"{sys.executable} -m loco certs")
        command = [*shell, text, *self.service("certs")["command"]]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def held(self) -> dict[str, bytes]:
        """What has been handed out."""
        return {str(p.relative_to(self.root)): p.read_bytes() for p in self.root.glob("bundle-*/*")}

    def healthy(self) -> bool:
        _, *command = self.service("coordinator")["healthcheck"]["test"]
        command = [self.here("coordinator", argument) for argument in command]
        return subprocess.run(command, capture_output=True).returncode == 0

    def prometheus(self) -> Process:
        config = self.root / "prometheus.yml"
        text = self.here("prometheus", (COMPOSE / "prometheus.yml").read_text())
        config.write_text(text.replace("15s", "1s"))
        for name in ("recording.yml", "alerts.yml"):
            (self.root / name).write_text((COMPOSE.parent / "prometheus" / name).read_text())
        process = Process(
            self.root / "prometheus.log",
            [
                program("prometheus"), f"--config.file={config}",
                f"--storage.tsdb.path={self.root}/prometheus",
                f"--web.listen-address=127.0.0.1:{self.ports['9090']}",
            ],
        )  # fmt: skip
        self._running.append(process)
        return process

    def scraped(self, expression: str) -> list[Any]:
        url = f"http://127.0.0.1:{self.ports['9090']}/api/v1/query?query={expression}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                result: list[Any] = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return result

    def stop(self) -> None:
        for process in reversed(self._running):
            process.__exit__()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    try:
        yield machine
    finally:
        machine.stop()


def test_the_services_come_up_secured_and_train(machine: Machine) -> None:
    machine.make_certificates()
    assert not machine.healthy()
    coordinator = machine.start("coordinator")
    eventually(
        lambda: machine.healthy() or coordinator.popen.poll() is not None, "healthy", SECONDS
    )
    assert coordinator.popen.poll() is None, coordinator.output
    assert "taken for revoked" not in coordinator.output  # it has the list
    machine.prometheus()
    sites = [machine.start(name) for name in ("paris", "oslo")]
    for site in sites:
        site.says("round 0: contribution included", SECONDS)
    eventually(lambda: machine.scraped("loco_rounds_total"), "scraped over TLS", 30)
    (up,) = machine.scraped("up")
    assert up["value"][1] == "1"
    eventually(
        lambda: len(machine.scraped("sum(loco_wire_bytes_total)by(site)")) >= 2, "both sites", 30
    )
    for site in sites:
        site.interrupt()
        assert site.wait() == 130, site.output


def test_bundles_are_renewed_before_they_end_and_revocations_handed_out(machine: Machine) -> None:
    machine.make_certificates()
    before = machine.held()
    assert len(before) == 6
    machine.make_certificates()  # another start keeps all
    assert machine.held() == before
    authority = Authority.open(machine.root / "authority")
    authority.issue("paris", days=9)
    machine.make_certificates()
    changed = {name for name, data in machine.held().items() if data != before[name]}
    # The list of revoked certificates is signed anew with each certificate.
    assert changed == {"bundle-paris/bundle.pem", "bundle-coordinator/revoked.pem"}
    renewed = read_bundle(machine.root / "bundle-paris" / "bundle.pem").identity
    assert renewed.not_after - time.time() > 29 * 86_400
    authority.revoke("oslo")
    machine.make_certificates()
    (oslo,) = (e for e in Authority.open(authority.directory).issued if e.name == "oslo")
    revoked = read_revoked(
        machine.root / "bundle-coordinator" / "revoked.pem", authority.certificate
    )
    assert int(oslo.serial, 16) in revoked


def test_renewal_is_the_same_script_once_a_day(machine: Machine) -> None:
    """Its loop, with a day of no length: it hands out until it is ended."""
    certs, renew = machine.service("certs"), machine.service("renew")
    assert (certs["command"], renew["command"]) == (["certs"], ["renew"])
    assert certs["entrypoint"] == renew["entrypoint"]
    script = renew["entrypoint"][-1]
    calls = "n=0; sleep() { n=$((n + 1)); echo $1 $n; [ $n -lt 3 ]; }; hand_out() { echo out; }\n"
    loop = calls + script[script.rindex("\nhand_out\n") :].replace("$$", "$")
    for name, said in (("certs", "out"), ("renew", "out 86400 1 out 86400 2 out 86400 3")):
        done = subprocess.run(["sh", "-euc", loop, name], capture_output=True, text=True)
        assert done.stdout.split() == said.split()


def test_grafana_finds_what_is_provisioned() -> None:
    """Grafana itself is not to be had here: that its files name one another is what can be said."""
    provisioning = COMPOSE / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    composed = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    assert source["url"] == "http://prometheus:9090"
    assert set(composed["grafana"]["networks"]) & set(composed["prometheus"]["networks"])
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "loco.yaml").read_text())[
        "providers"
    ]
    mounts = dict(v.split(":")[1::-1] for v in composed["grafana"]["volumes"])
    dashboards = COMPOSE / mounts[provider["options"]["path"]]
    assert (dashboards / "overview.json").exists()
    home = composed["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/overview.json"
