"""The Monitor, played through the real round machine: series, counters, history, status, notes.

Expected numbers are worked out by hand beside each test. No test reads a clock: time is given.
    pytest tests/coordinator/test_monitor.py
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from support.play import Play, playing
from support.runs import LAYOUT, config_of, create_store, shard_body, vector

from coordinator.events import (
    HoldChanged,
    SettingChanged,
    ShardRefused,
    SiteEvicted,
    SiteLost,
    SiteReadmitted,
    SnapshotRequested,
)
from coordinator.history import MAX_SITES
from coordinator.measure import measure_update, support_overlap
from coordinator.monitor import LINGER_SECONDS
from coordinator.status import SHOWN_LEFT, bound
from loco import codec
from loco.layout import cells
from loco.wire.v1 import coordinator_pb2 as pb


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    config = config_of(run={"rounds": 3}, inner={"steps": 5}, quorum={"min_sites": 2})
    with playing(create_store(tmp_path, config)) as made:
        yield made


@pytest.fixture
def pair(play: Play) -> Play:
    play.join("oslo")
    play.join("paris")
    return play


def page_length(play: Play) -> int:
    """Lines of /metrics, without the process's own, which may come and go."""
    text = generate_latest(play.monitor.registry).decode()
    return sum(not line.startswith(("process_", "#")) for line in text.splitlines())


def exchange(play: Play, seconds: float = 60.0) -> None:
    """One round: both contributions, `seconds` after the last one."""
    play.now += seconds
    for site in ("oslo", "paris"):
        play.push(site)


# --- series of sites ----------------------------------------------------------------------------


def visit(play: Play, site: str) -> None:
    """A site comes, says all that a site can say, and goes."""
    play.join(site)
    for direction in ("up", "down"):
        play.monitor.count(site, direction, "control", 100)
    play.beat(
        site,
        phase=pb.SITE_PHASE_WAIT,
        phase_seconds=[pb.PhaseSeconds(phase=pb.SITE_PHASE_PUSH, seconds=1)],
        spans=[pb.PhaseSpan(phase=pb.SITE_PHASE_COMPUTE, round=0, seconds=1)],
        reports=[pb.RoundReport(round=0, train_bits_per_byte=3, ef_norm=1)],
        train_bits_per_byte=3,
        link_bytes_per_second=1e6,
    )
    play.leave(site)


def test_a_thousand_sites_come_and_go_and_the_page_has_its_length(pair: Play) -> None:
    visit(pair, "guest")
    pair.now += LINGER_SECONDS + 1
    pair.join("last")
    before = page_length(pair)
    for i in range(1000):
        pair.now += 1.0
        visit(pair, f"guest-{i}")
    assert page_length(pair) > before  # those of the last two minutes are still there
    pair.now += LINGER_SECONDS + 1
    pair.leave("last")
    pair.join("last", instance="b")
    assert page_length(pair) == before
    # Nor do the documents and what they are made from grow for ever.
    assert len(pair.monitor.history.sites) <= MAX_SITES
    assert len(pair.monitor.status(pair.state)["sites"]) <= SHOWN_LEFT + 3


def test_series_of_a_lost_site_stay_for_the_next_scrapes_and_then_go(pair: Play) -> None:
    pair.submit(SiteLost(site="paris", incarnation=1))
    assert pair.value("loco_site_alive", site="paris") == 0
    assert pair.value("loco_sites", state="lost") == 1
    pair.now += LINGER_SECONDS + 1
    pair.join("quito")
    assert pair.value("loco_site_alive", site="paris") is None
    assert pair.value("loco_sites", state="lost") == 1
    assert pair.value("loco_site_alive", site="oslo") == 1


def test_a_site_that_was_never_heard_after_a_restart_departs_quietly(pair: Play) -> None:
    del pair.monitor.told["paris"]  # as a monitor that did not see the site join
    pair.submit(SiteLost(site="paris", incarnation=1))
    pair.now += LINGER_SECONDS + 1
    pair.join("quito")
    assert pair.value("loco_site_alive", site="paris") is None


def test_strangers_share_one_series(pair: Play) -> None:
    for i in range(100):
        pair.monitor.count(f"stranger-{i}", "up", "control", 10)
    assert pair.value("loco_wire_bytes_total", site="none", direction="up", kind="control") == 1000


def test_bytes_of_a_site_that_left_stay_in_the_status(pair: Play) -> None:
    pair.monitor.count("paris", "up", "contribution", 1234)
    pair.leave("paris")
    pair.now += LINGER_SECONDS + 1
    pair.join("quito")
    (paris,) = (s for s in pair.monitor.status(pair.state)["sites"] if s["name"] == "paris")
    assert paris["bytes_up"] == 1234
    assert paris["bytes_up_by_kind"] == {"contribution": 1234}


# --- rounds -------------------------------------------------------------------------------------


def test_registered_alive_and_included_are_three_numbers(pair: Play) -> None:
    exchange(pair)
    pair.leave("paris")
    counts = {s: pair.value("loco_sites", state=s) for s in ("registered", "alive", "included")}
    assert counts == {"registered": 2, "alive": 1, "included": 2}


def test_a_committed_round_is_counted_and_remembered(pair: Play) -> None:
    opened = pair.now
    exchange(pair, seconds=42.0)
    assert pair.value("loco_rounds_total") == 1
    assert pair.value("loco_round_seconds_sum") == 42.0
    assert pair.value("loco_progress_timestamp_seconds") == opened + 42.0
    assert pair.value("loco_tokens_total", site="paris") == 10
    run = pair.monitor.history.document(0)["run"]
    assert run["opened_at"][0] == opened
    assert run["committed_at"][0] == opened + 42.0
    assert run["num_included"] == [2, None]


def test_ratio_and_bits_a_value(pair: Play) -> None:
    pair.push("oslo", num_values=200, size_bytes=300)
    pair.push("paris", num_values=100, size_bytes=150)
    dense = LAYOUT.dense_bytes
    assert pair.value("loco_compression_ratio", direction="up") == pytest.approx(2 * dense / 450)
    assert pair.value("loco_compression_ratio", direction="down") == pytest.approx(dense / 3000)
    assert pair.value("loco_bits_per_value", direction="up") == pytest.approx(8 * 450 / 300)


def test_a_round_that_closes_without_a_lost_site_is_missed_by_it(tmp_path: Path) -> None:
    config = config_of(run={"rounds": 9}, quorum={"min_sites": 2})
    with playing(create_store(tmp_path, config)) as play:
        for site in ("oslo", "paris", "quito"):
            play.join(site)
        play.submit(SiteLost(site="quito", incarnation=1))
        exchange(play)
        assert play.value("loco_site_rounds_missed_total", site="quito") == 1
        assert play.value("loco_site_rounds_missed_total", site="oslo") == 0
        assert play.value("loco_site_rounds_included_total", site="oslo") == 1


def test_finished_run_says_so_and_final_theta_has_its_measurement(pair: Play) -> None:
    for _ in range(3):
        exchange(pair)
    pair.beat("oslo", round=3, evaluations=[pb.Evaluation(round=3, bits_per_byte=2.5)])
    assert pair.value("loco_run_finished") == 1
    assert pair.monitor.status(pair.state)["validation"] == [{"round": 3, "bits_per_byte": 2.5}]


# --- heartbeats ---------------------------------------------------------------------------------


def span(phase: pb.SitePhase.ValueType, seconds: float, ago: float = 0.0) -> pb.PhaseSpan:
    return pb.PhaseSpan(phase=phase, round=0, seconds=seconds, ended_ago_seconds=ago)


def test_a_span_that_is_told_twice_counts_once(pair: Play) -> None:
    first = span(pb.SITE_PHASE_COMPUTE, 10.0, ago=3.0)
    pair.beat("oslo", spans=[first])
    pair.beat("oslo", spans=[first, span(pb.SITE_PHASE_ENCODE, 2.0, ago=1.0)])  # no answer came
    pair.beat("oslo", spans=[span(pb.SITE_PHASE_PUSH, 1.0)], num_earlier_spans=2)
    lately = pair.monitor.history.phase_sums("oslo", 10)
    assert lately == {"compute": 10.0, "encode": 2.0, "push": 1.0}
    assert pair.value("loco_phase_seconds_count", phase="compute") == 1
    spans = pair.monitor.timeline(since=0)["sites"]["oslo"]
    assert spans[0] == ["compute", 0, pair.now - 13.0, 10.0]


def test_timeline_gives_only_what_ended_later(pair: Play) -> None:
    pair.beat(
        "oslo", spans=[span(pb.SITE_PHASE_COMPUTE, 5.0, ago=9.0), span(pb.SITE_PHASE_PUSH, 2)]
    )
    assert [s[0] for s in pair.monitor.timeline(pair.now - 1)["sites"]["oslo"]] == ["push"]


def test_members_that_come_and_go_are_shown(pair: Play) -> None:
    """3 ranks, then 2: one change more, one step given up, a quarter of the shards lost."""
    told = pb.Membership(members=3, changes=1, quorums=10, quorum_seconds=0.5)
    pair.beat("oslo", membership=told)
    told.MergeFrom(pb.Membership(members=2, changes=2, quorums=14, quorum_seconds=2.5))
    told.failed_commits, told.healed_bytes, told.lost_fraction = 1, 4096, 0.25
    pair.beat("oslo", membership=told)
    shown = {
        "loco_site_members": 2,
        "loco_member_changes_total": 2,
        "loco_quorums_total": 14,
        "loco_quorum_seconds_total": 2.5,
        "loco_failed_commits_total": 1,
        "loco_healed_bytes_total": 4096,
        "loco_shard_lost_fraction": 0.25,
    }
    assert {name: pair.value(name, site="oslo") for name in shown} == shown
    sites = {site["name"]: site for site in pair.monitor.status(pair.state)["sites"]}
    keys = ("members", "member_changes", "quorums", "quorum_seconds", "failed_commits")
    keys += ("healed_bytes", "shard_lost_fraction")
    assert [sites["oslo"][key] for key in keys] == [2, 2, 14, 2.5, 1, 4096, 0.25]
    assert not any(sites["paris"][key] for key in keys)


def total(site: str, value: int, play: Play) -> None:
    play.beat(site, totals=pb.SiteTotals(retries=value))


def test_sums_of_a_new_process_life_do_not_make_the_counter_fall(pair: Play) -> None:
    for value in (3, 5):
        total("oslo", value, pair)
    assert pair.value("loco_retries_total", site="oslo") == 5
    pair.join("oslo", instance="b")
    total("oslo", 2, pair)
    assert pair.value("loco_retries_total", site="oslo") == 7


def test_after_a_restart_of_the_coordinator_counters_begin_at_the_first_heartbeat(
    pair: Play,
) -> None:
    del pair.monitor.told["oslo"]  # as a monitor that did not see the site join
    total("oslo", 1000, pair)
    assert pair.value("loco_retries_total", site="oslo") == 0
    total("oslo", 1001, pair)
    assert pair.value("loco_retries_total", site="oslo") == 1


def pushed(play: Play, seconds: float, num_bytes: int, **fields: float) -> None:
    """The leader of the site has sent so many bytes in so many seconds, since it joined."""
    play.beat("oslo", totals=pb.SiteTotals(up_seconds=seconds, up_bytes=num_bytes), **fields)


def test_goodput_is_bytes_over_the_time_of_transfers(pair: Play) -> None:
    pushed(pair, seconds=2.0, num_bytes=4000)
    goodput = {"site": "oslo", "direction": "up"}
    assert pair.value("loco_link_goodput_bytes_per_second", **goodput) == 2000
    pushed(pair, seconds=6.0, num_bytes=8000)
    assert pair.value("loco_link_goodput_bytes_per_second", **goodput) == 1000
    assert pair.value("loco_link_rate_bytes_per_second", **goodput) == 2000  # the best one


def test_a_stated_link_rate_goes_before_the_measured_one(pair: Play) -> None:
    pushed(pair, seconds=2.0, num_bytes=4000, link_bytes_per_second=12.5e6)
    rate = pair.value("loco_link_rate_bytes_per_second", site="oslo", direction="up")
    assert rate == 12.5e6


def test_ranks_whose_parts_go_beside_the_leaders_count(pair: Play) -> None:
    pushed(pair, seconds=2.0, num_bytes=4000, ranks=3)
    labels = {"site": "oslo", "direction": "up"}
    assert pair.value("loco_link_goodput_bytes_per_second", **labels) == 6000


def test_what_comes_along_with_other_calls_is_no_measure_of_the_link(pair: Play) -> None:
    """Updates that come with a directive, behind inner steps: their time is nobody's phase."""
    pair.monitor.count("oslo", "down", "update", 10_000)
    pair.beat("oslo", phase_seconds=[pb.PhaseSeconds(phase=pb.SITE_PHASE_PULL, seconds=1e-4)])
    labels = {"site": "oslo", "direction": "down"}
    assert pair.value("loco_link_goodput_bytes_per_second", **labels) is None


def test_the_time_of_an_inner_step_is_the_sites_own_measure(pair: Play) -> None:
    pair.beat("oslo", step_seconds=0.25, spans=[span(pb.SITE_PHASE_COMPUTE, 10.0)])
    assert pair.value("loco_inner_step_seconds", site="oslo") == 0.25


def test_a_site_that_stops_on_nan_is_counted_once(pair: Play) -> None:
    pair.beat("oslo", non_finite=True)
    pair.beat("oslo", non_finite=True)
    assert pair.value("loco_non_finite_total", site="oslo") == 1


def test_a_wrong_theta_is_told(pair: Play) -> None:
    pair.beat("oslo", round=0, theta_digest="theta0")
    pair.beat("paris", round=0, theta_digest="another")
    agrees = {s["name"]: s["theta_agrees"] for s in pair.monitor.status(pair.state)["sites"]}
    assert agrees == {"oslo": True, "paris": False}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"compute": 10.0, "push": 4.0, "wait": 9.0}, "compute"),
        ({"compute": 3.0, "push": 4.0, "wait": 1.0}, "uplink"),
        ({"compute": 3.0, "eval": 3.0, "wait": 5.0}, "compute"),
        ({"compute": 1.0, "pull": 2.0}, "downlink"),
        ({"encode": 1.0, "apply": 1.5, "compute": 2.0}, "codec"),
        ({"wait": 9.0, "compute": 2.0}, "waiting"),
        ({"sync": 100.0}, None),
        ({}, None),
    ],
)
def test_what_bounds_a_site(seconds: dict[str, float], expected: str | None) -> None:
    assert bound(seconds) == expected


# --- refusals, orders, settings -----------------------------------------------------------------


def test_refusals_are_counted_by_reason_and_the_last_are_shown(pair: Play) -> None:
    for i in range(60):
        pair.monitor.refused("payload", f"shard {i} is malformed")
    assert pair.value("loco_rejections_total", reason="payload") == 60
    assert pair.value("loco_rejections_total", reason="corrupt") == 0
    shown = pair.monitor.status(pair.state)["refusals"]
    assert len(shown) == 50
    assert shown[0] == {"at": pair.now, "what": "payload", "message": "shard 59 is malformed"}


def test_every_order_is_counted_and_noted(pair: Play) -> None:
    for order, event in (
        ("set", SettingChanged(key="outer.alpha", value=0.5)),
        ("snapshot", SnapshotRequested()),
        ("pause", HoldChanged(hold="paused")),
        ("resume", HoldChanged(hold="none")),
        ("drain", HoldChanged(hold="draining")),
        ("evict", SiteEvicted(site="paris")),
        ("readmit", SiteReadmitted(site="paris")),
    ):
        pair.submit(event)
        assert pair.value("loco_orders_total", order=order) == 1
        assert order in [note["what"] for note in pair.monitor.status(pair.state)["notes"]]
    assert pair.value("loco_run_held") == 1


def test_a_pause_is_no_time_without_progress(pair: Play) -> None:
    """Or a run that goes on after a long one would page at once."""
    pair.submit(HoldChanged(hold="paused"))
    before = pair.value("loco_progress_timestamp_seconds")
    pair.now += 7200.0
    pair.submit(HoldChanged(hold="none"))
    assert pair.value("loco_progress_timestamp_seconds") == pair.now != before


def test_a_changed_alpha_is_shown_from_the_round_that_it_holds_for(pair: Play) -> None:
    pair.submit(SettingChanged(key="outer.alpha", value=0.5))
    assert pair.value("loco_outer_alpha") == 1.0
    exchange(pair)
    assert pair.value("loco_outer_alpha") == 0.5


def test_a_quarantined_site_is_one_of_the_counts(pair: Play) -> None:
    for cursor in range(pair.state.rules.quarantine_after):
        pair.submit(
            ShardRefused(
                site="paris", incarnation=1, round=0, shard=0, data_cursor=cursor, reason="payload"
            )
        )
    assert pair.value("loco_sites", state="quarantined") == 1
    assert pair.value("loco_site_alive", site="paris") == 0


# --- measured from files ------------------------------------------------------------------------


def test_update_measures_equal_numpys(tmp_path: Path) -> None:
    d = vector(LAYOUT, seed=3)
    config = config_of(codec={"k": 64})
    path = tmp_path / "update"
    path.write_bytes(shard_body(d, config))
    decoded = np.zeros_like(d)
    for cell in cells(range(LAYOUT.num_chunks)):
        here = slice(cell.start * 4096, cell.stop * 4096)
        sent = codec.encode(d[here], k=64, bits=2)
        decoded[here][sent.indices] = sent.values
    measured = measure_update(path, LAYOUT)
    assert measured is not None
    assert measured.norm == pytest.approx(float(np.linalg.norm(decoded)), rel=1e-6)
    assert measured.num_values == np.count_nonzero(decoded)
    assert measured.density == measured.num_values / LAYOUT.num_parameters


@pytest.mark.parametrize(
    ("supports", "expected"),
    [
        ([{1, 2, 3, 4}, {5, 6, 7, 8}], 0.0),
        ([{1, 2, 3, 4}, {3, 4, 5, 6}], 0.5),
        ([{1, 2, 3, 4}, {1, 2}], 1.0),
        ([{1, 2}, {1, 2}, {3, 4}], 0.5),
        ([{1, 2}], None),
    ],
)
def test_support_overlap(supports: list[set[int]], expected: float | None) -> None:
    union = len(set().union(*supports))
    assert support_overlap([len(s) for s in supports], union) == expected


def test_the_update_is_measured_beside_the_run(pair: Play) -> None:
    d = vector(LAYOUT, seed=3)
    path = pair.store.update(0)
    path.write_bytes(shard_body(d, config_of(codec={"k": 64})))
    exchange(pair)
    asyncio.run(pair.monitor.housekeeping())
    measured = measure_update(path, LAYOUT)
    assert measured is not None
    assert pair.value("loco_update_norm") == measured.norm
    assert pair.value("loco_union_density_ratio") == measured.density
    assert pair.monitor.history.run.get("update_norm", 0) == measured.norm
    assert (pair.value("loco_state_disk_free_bytes") or 0) > 0


def test_an_update_that_is_forgotten_meanwhile_is_not_measured(pair: Play) -> None:
    exchange(pair)
    asyncio.run(pair.monitor.housekeeping())
    assert math.isnan(pair.value("loco_update_norm") or 0)
