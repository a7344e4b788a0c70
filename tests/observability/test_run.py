"""A two-site run over cards that count, scraped by Prometheus, watched in Chromium.

Compared: every expression of dashboards and rules with what Prometheus answers; the bandwidth
panels with the card's own counters; the page's numbers with /status.json, at two sizes and in two
themes.
    pytest tests/observability/test_run.py
LOCO_SCREENSHOTS=docs/images writes the screenshots of the documentation there.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from observability.browser import SIZES, THEMES, browser, complaints, dress, whole_page
from observability.scene import LISTEN, METRICS, ROOT, ROUNDS, SITES, Scene, loco, two_site_run
from selenium import webdriver
from support.programs import program

from loco.metrics import KINDS
from loco.status import human_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

LOOKS = [(size, theme) for size in SIZES for theme in THEMES]
# What the page shows and the document it was made from, read in one turn of the page's loop.
_READ = """
const text = (selector) => document.querySelector(selector)?.textContent ?? "";
const cell = (row, column) => row.querySelector(`[data-column="${column}"]`).textContent;
return {
  status,
  rounds: text("#rounds"),
  figures: [...document.querySelectorAll("#figures dd")].map((dd) => dd.firstChild.data),
  sites: Object.fromEntries([...document.querySelectorAll("#sites tbody tr")].map((row) => [
    row.dataset.site,
    ["round", "loss", "up", "down", "bound by"].map((column) => cell(row, column)),
  ])),
  charts: [...document.querySelectorAll(".chart canvas")].map((c) => c.width * c.height),
  refusals: text("#refusals"),
  notes: text("#notes"),
  overflow: document.documentElement.scrollWidth - innerWidth,
};
"""


@pytest.fixture(scope="module")
def run_and_views(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Scene, dict[tuple[str, str, str], dict[str, Any]]]]:
    """The finished run, and what the page showed: (when, size, theme) -> reading."""
    directory = tmp_path_factory.mktemp("run")
    views: dict[tuple[str, str, str], dict[str, Any]] = {}
    with two_site_run(directory, lambda scene: _look(scene, "during", views)) as scene:
        _look(scene, "after", views)
        yield scene, views


def _look(scene: Scene, when: str, views: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    images = Path(os.environ.get("LOCO_SCREENSHOTS", scene.directory))
    with browser(scene.directory / f"profile-{when}") as driver:
        for size, theme in LOOKS:
            dress(driver, size, theme)
            driver.get(f"http://{METRICS}/")
            scene.until(lambda: _is_filled(driver), f"the page is filled ({size}, {theme})", 30)
            reading = driver.execute_script(_READ)
            reading["complaints"] = complaints(driver)
            views[when, size, theme] = reading
            whole_page(driver, images / f"page-{when}-{size}-{theme}.png")


def _is_filled(driver: webdriver.Chrome) -> bool:
    script = "return document.querySelectorAll('#sites tbody tr').length"
    return driver.execute_script(script) == len(SITES)


@pytest.fixture(scope="module")
def scene(run_and_views: Any) -> Scene:
    made: Scene = run_and_views[0]
    return made


# --- the page -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["during", "after"])
@pytest.mark.parametrize(("size", "theme"), LOOKS)
def test_page_shows_what_status_says(run_and_views: Any, when: str, size: str, theme: str) -> None:
    view = run_and_views[1][when, size, theme]
    status = view["status"]
    assert view["complaints"] == []
    assert view["rounds"] == f"round {status['round']} of {ROUNDS}"
    validation = f"{status['validation'][-1]['bits_per_byte']:.3f}"
    assert view["figures"][:2] == [validation, str(status["sites_alive"])]
    assert view["figures"][3] == human_bytes(status["update_bytes"])
    for site in status["sites"]:
        assert view["sites"][site["name"]] == [
            str(site["round"]),
            f"{site['train_bits_per_byte']:.3f}",
            human_bytes(site["bytes_up"]),
            human_bytes(site["bytes_down"]),
            site["bound"],
        ]
    assert len(view["charts"]) == 3
    assert all(pixels > 0 for pixels in view["charts"])
    assert view["overflow"] <= 0  # nothing sticks out of a phone's screen


def test_page_after_the_run_is_of_the_same_document(scene: Scene, run_and_views: Any) -> None:
    now, seen = scene.status(), run_and_views[1]["after", "phone", "dark"]["status"]
    assert now["phase"] == "finished"
    for key in ("run_id", "round", "theta_digest", "validation", "sites", "config", "notes"):
        assert seen[key] == now[key]


def test_page_tells_of_operators_and_survives_a_restart(scene: Scene, run_and_views: Any) -> None:
    assert "resumed the run" in run_and_views[1]["after", "desktop", "light"]["notes"]
    history = json.loads(scene.get("history.json"))
    assert history["num_rounds"] == ROUNDS + 1
    losses = history["sites"]["oslo"]["train_bits_per_byte"]
    assert all(loss is not None for loss in losses[:ROUNDS])  # those before the restart too


# --- Prometheus ---------------------------------------------------------------------------------


def expressions_of_dashboards() -> list[Any]:
    found = []
    for path in sorted((ROOT / "deploy" / "grafana").glob("*.json")):
        document = json.loads(path.read_text())
        for panel in document["panels"]:
            for target in panel.get("targets", ()):
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                found.append(pytest.param(target["expr"], id=name))
        found += [
            pytest.param(annotation["expr"], id=f"{path.stem}: {annotation['name']}")
            for annotation in document["annotations"]["list"]
        ]
    return found


def rules(file: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _has_numbers(result: list[dict[str, Any]]) -> bool:
    values = [float(value) for series in result for _, value in series["values"]]
    return any(math.isfinite(value) for value in values)


@pytest.mark.parametrize("expr", expressions_of_dashboards())
def test_dashboard_expression_returns_data(scene: Scene, expr: str) -> None:
    assert _has_numbers(scene.over_the_run(expr))


@pytest.mark.parametrize("rule", rules("recording.yml"), ids=lambda rule: rule["record"])
def test_recording_rule_returns_data(scene: Scene, rule: dict[str, Any]) -> None:
    assert _has_numbers(scene.over_the_run(rule["expr"]))
    assert _has_numbers(scene.over_the_run(rule["record"]))


@pytest.mark.parametrize("rule", rules("alerts.yml"), ids=lambda rule: rule["alert"])
def test_alert_reads_data_and_does_not_fire(scene: Scene, rule: dict[str, Any]) -> None:
    selectors = re.findall(r"(?:\b(?:loco|site|run|up|process)[\w:]*)(?:\{[^}]*\})?", rule["expr"])
    for selector in selectors:
        assert _has_numbers(scene.over_the_run(selector)), selector
    assert not scene.at_the_end(f'ALERTS{{alertname="{rule["alert"]}",alertstate="firing"}}')


def test_metrics_obey_the_conventions(scene: Scene) -> None:
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=scene.get("metrics"),
        capture_output=True,
        text=True,
    )
    # Bits are the unit of a loss and of a code here, not an amount of data.
    assert [line for line in done.stderr.splitlines() if "bits_per_" not in line] == []
    assert done.returncode in (0, 3)  # 3: it has found something, as above


@pytest.mark.parametrize(
    ("title", "direction"), [("Sent, range", "up"), ("Received, range", "down")]
)
def test_bandwidth_panels_agree_with_the_card(scene: Scene, title: str, direction: str) -> None:
    document = json.loads((ROOT / "deploy/grafana/bandwidth.json").read_text())
    (panel,) = (p for p in document["panels"] if p["title"] == title)
    (series,) = scene.at_the_end(panel["targets"][0]["expr"])
    panel_bytes = float(series["value"][1])
    card_bytes = scene.card_up if direction == "up" else scene.card_down
    print(f"{title}: panel {panel_bytes:.0f}, card {card_bytes}: {panel_bytes / card_bytes:.4f}")
    assert panel_bytes == pytest.approx(card_bytes, rel=0.05)


def test_bytes_by_kind_are_those_of_the_run(scene: Scene) -> None:
    kinds = {
        (series["metric"]["site"], series["metric"]["kind"])
        for series in scene.over_the_run("loco_wire_bytes_total")
        if series["metric"]["site"] != "none"
    }
    assert kinds == {(site, kind) for site in SITES for kind in KINDS}


# --- terminal, report, logs ---------------------------------------------------------------------


def test_report_draws_without_a_server(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    state = str(scene.directory / "state")
    subprocess.run(loco("report", "--state", state, "--out", str(out)), check=True)
    with browser(tmp_path / "profile") as driver:
        dress(driver, "desktop", "light")
        driver.get(f"file://{out}")
        read = "return [document.querySelectorAll('.chart canvas').length, document.body.innerText]"
        num_charts, text = driver.execute_script(read)
        assert complaints(driver) == []
    assert num_charts == 5
    assert f"{ROUNDS} of {ROUNDS} rounds" in text
    assert scene.status()["run_id"] in text


def test_terminal_shows_the_same(scene: Scene) -> None:
    done = subprocess.run(
        loco("status", LISTEN, *scene.operator), capture_output=True, text=True, check=True
    )
    for site in scene.status()["sites"]:
        (row,) = (line for line in done.stdout.splitlines() if line.startswith(site["name"]))
        for number in (
            site["bound"],
            human_bytes(site["bytes_up"]),
            human_bytes(site["bytes_down"]),
        ):
            assert number in row


def test_log_lines_are_json_with_run_site_round_and_phase(scene: Scene) -> None:
    run_id = scene.status()["run_id"]
    for name in ("coordinator", *SITES):
        lines = [json.loads(line) for line in scene.log(name).splitlines() if line]
        assert {"time", "level", "logger", "message"} <= lines[-1].keys()
        assert lines[-1]["run"] == run_id
        assert any("round" in line and "phase" in line for line in lines)
        if name in SITES:
            assert lines[-1]["site"] == name
