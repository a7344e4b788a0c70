"""The metrics module against Prometheus' naming conventions, and against the bounds on labels.

pytest tests/loco/test_metrics.py
"""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from loco.metrics import (
    PHASES,
    Catalogue,
    CoordinatorMetrics,
    Description,
    WireMetrics,
    markdown,
)
from loco.wire.protocol import phase_name
from loco.wire.v1 import coordinator_pb2 as pb

BOUNDED = {
    "certificate",
    "site",
    "direction",
    "kind",
    "reason",
    "phase",
    "state",
    "order",
    "version",
    "run_id",
}


def described() -> list[Description]:
    return CoordinatorMetrics(CollectorRegistry()).catalogue.described


@pytest.mark.parametrize("metric", described(), ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Description) -> None:
    assert re.fullmatch(r"loco_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|millis|kb|mb|percent|minutes)(_|$)", metric.name)
    assert metric.kind != "histogram" or metric.name.endswith("_seconds")
    assert metric.help.endswith(".")


@pytest.mark.parametrize("metric", described(), ids=lambda metric: metric.name)
def test_labels_are_bounded(metric: Description) -> None:
    assert set(metric.labels) <= BOUNDED


def test_names_are_unique() -> None:
    names = [metric.name for metric in described()]
    assert len(names) == len(set(names))


def test_phases_are_those_of_the_wire() -> None:
    wire = [phase_name(value) for value in pb.SitePhase.values() if value]
    assert sorted(PHASES) == sorted(wire)


def test_a_forgotten_site_leaves_nothing_behind() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    before = generate_latest(registry)
    metrics.appear("paris", {("paris", "up", "control"): 7})
    metrics.wire.count("paris", "up", "update", 5)
    metrics.sites.phase_seconds.labels("paris", "push").inc()
    metrics.codec.contribution_bytes.labels("paris").set(7)
    assert generate_latest(registry) != before
    metrics.catalogue.forget_site("paris")
    assert generate_latest(registry) == before


def test_forgetting_one_site_leaves_the_others() -> None:
    registry = CollectorRegistry()
    wire = WireMetrics(catalogue := Catalogue(registry))
    for site in ("oslo", "paris"):
        wire.count(site, "up", "control", 3)
    catalogue.forget_site("paris")
    labels = {"direction": "up", "kind": "control"}
    assert registry.get_sample_value("loco_wire_bytes_total", {"site": "oslo", **labels}) == 3
    assert registry.get_sample_value("loco_wire_bytes_total", {"site": "paris", **labels}) is None


def test_the_documentation_has_a_line_for_each_metric() -> None:
    lines = markdown().splitlines()
    for metric in described():
        assert sum(line.startswith(f"| `{metric.name}` |") for line in lines) == 1
