"""Overview: is the run healthy, how far is it, what bounds it."""

from grafana_foundation_sdk.builders import dashboard
from panels import ALL, BAD_WHEN_ANY, RATE, Panel, board, filled, lines, number


def overview() -> dashboard.Dashboard:
    made = board("loco-overview", "loco / Overview", __doc__ or "", site=False)
    return filled(
        made,
        ("Is it healthy?", _health()),
        ("How far?", _progress()),
        ("What bounds it?", _bounds()),
    )


def _health() -> list[Panel]:
    return [
        number(
            "Since progress",
            "Seconds since a round was committed (or the coordinator started).",
            f"time() - loco_progress_timestamp_seconds{{{ALL}}}",
            unit="s",
            decimals=0,
            runbook="loconoroundcommitted",
        ),
        number(
            "Sites alive",
            "Sites that are heard of.",
            f'loco_sites{{{ALL},state="alive"}}',
            steps=((None, "red"), (1, "green")),
            runbook="locobelowquorum",
        ),
        number(
            "Included in the last round",
            "Sites whose contribution the last round included.",
            f'loco_sites{{{ALL},state="included"}}',
        ),
        number(
            "Lost or quarantined",
            "Sites that fell silent, or whose contributions were refused too often.",
            f'sum by (instance) (loco_sites{{{ALL},state=~"lost|quarantined"}})',
            steps=BAD_WHEN_ANY,
            runbook="locositelost",
        ),
        number(
            "Digest mismatches, 1 h",
            "Sites whose theta was not the run's; each is repaired from a snapshot.",
            f"sum by (instance) (increase(loco_digest_mismatches_total{{{ALL}}}[1h]))",
            steps=BAD_WHEN_ANY,
            decimals=0,
            runbook="locodigestmismatch",
        ),
        number(
            "Refused, 1 h",
            "Requests refused, for any reason.",
            f"sum by (instance) (increase(loco_rejections_total{{{ALL}}}[1h]))",
            steps=((None, "green"), (1, "yellow")),
            decimals=0,
            runbook="lococontributionsrefused",
        ),
    ]


def _progress() -> list[Panel]:
    return [
        number(
            "Done",
            "Committed rounds over planned rounds.",
            f"loco_round{{{ALL}}} / loco_planned_rounds{{{ALL}}}",
            unit="percentunit",
        ),
        number("Round", "The round that is open.", f"loco_round{{{ALL}}}"),
        number(
            "Validation",
            "Loss of theta on held-out text, bits per byte.",
            f"loco_validation_bits_per_byte{{{ALL}}}",
            decimals=3,
            runbook="locolossrises",
        ),
        number(
            "A round takes",
            "Mean over the last 15 minutes.",
            f"rate(loco_round_seconds_sum{{{ALL}}}[15m]) "
            f"/ rate(loco_round_seconds_count{{{ALL}}}[15m])",
            unit="s",
        ),
        number(
            "Tokens a second",
            "In included contributions, all sites.",
            f"sum by (instance) (rate(loco_tokens_total{{{ALL}}}[15m]))",
            unit="short",
        ),
        number(
            "Held by an operator",
            "1 while the run is paused or drained.",
            f"loco_run_held{{{ALL}}}",
            steps=((None, "green"), (1, "yellow")),
        ),
        lines(
            "Loss",
            "Training loss by site, and of theta on held-out text.",
            (
                (f"loco_train_bits_per_byte{{{ALL}}}", "{{site}}"),
                (f"loco_validation_bits_per_byte{{{ALL}}}", "validation"),
            ),
            unit="none",
            low=None,
        ),
        lines(
            "Rounds a minute",
            "Committed.",
            ((f"60 * rate(loco_rounds_total{{{ALL}}}[{RATE}])", "{{instance}}"),),
            unit="none",
        ),
    ]


def _bounds() -> list[Panel]:
    return [
        lines(
            "Where the time goes",
            "Share of the sites' time by phase, mean of all sites. The widest band bounds the "
            "run: compute, the uplink (push), the downlink (pull), or other sites (wait).",
            (
                (
                    f"avg by (phase) (rate(loco_site_phase_seconds_total{{{ALL}}}[{RATE}]))",
                    "{{phase}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
        ),
        lines(
            "Compute utilisation",
            "Share of its time that a site spends in inner steps.",
            (
                (
                    f'rate(loco_site_phase_seconds_total{{{ALL},phase="compute"}}[{RATE}])',
                    "{{site}}",
                ),
            ),
            unit="percentunit",
        ),
    ]
