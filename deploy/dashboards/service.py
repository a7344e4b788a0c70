"""Coordinator: rounds, the outer step, refusals, and the process itself."""

from grafana_foundation_sdk.builders import dashboard
from panels import ALL, RATE, Panel, board, filled, lines, number


def _quantile(metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile(0.9, sum by ({labels}) (rate({metric}_bucket{{{ALL}}}[{RATE}])))"


def _mean(metric: str, by: str) -> str:
    total, count = (
        f"sum by ({by}) (rate({metric}_{part}{{{ALL}}}[{RATE}]))" for part in ("sum", "count")
    )
    return f"{total} / {count}"


def coordinator() -> dashboard.Dashboard:
    made = board("loco-coordinator", "loco / Coordinator", __doc__ or "", site=False)
    return filled(
        made,
        ("Now", _now()),
        ("Rounds", _rounds()),
        ("Refusals and the process", _process()),
        ("Settings and orders", _settings()),
    )


def _now() -> list[Panel]:
    return [
        number(
            "Disk free",
            "Of the file system of the state directory.",
            f"loco_state_disk_free_bytes{{{ALL}}} / loco_state_disk_size_bytes{{{ALL}}}",
            unit="percentunit",
            steps=((None, "red"), (0.1, "yellow"), (0.2, "green")),
            runbook="locodiskfillsup",
        ),
        number(
            "State",
            "Bytes of the state directory.",
            f"loco_state_bytes{{{ALL}}}",
            unit="decbytes",
        ),
        number(
            "Memory",
            "Resident.",
            f"process_resident_memory_bytes{{{ALL}}}",
            unit="decbytes",
        ),
        number(
            "Up for",
            "Since the process started.",
            f"time() - process_start_time_seconds{{{ALL}}}",
            unit="s",
            decimals=0,
        ),
        number("H", "Inner steps a round.", f"loco_inner_steps_per_round{{{ALL}}}"),
        number("alpha", "Outer learning rate.", f"loco_outer_alpha{{{ALL}}}", decimals=3),
    ]


def _rounds() -> list[Panel]:
    return [
        lines(
            "Rounds",
            "Mean and 90th percentile of a round from opened to committed, and of the "
            "reduction alone.",
            (
                (_mean("loco_round_seconds", "instance"), "round, mean"),
                (_quantile("loco_round_seconds"), "round, 90 %"),
                (_mean("loco_reduce_seconds", "instance"), "reduction, mean"),
            ),
            unit="s",
        ),
        lines(
            "Phases at the sites",
            "90th percentile of the duration of one phase of a round, over all sites.",
            ((_quantile("loco_phase_seconds", "phase"), "{{phase}}"),),
            unit="s",
        ),
        lines(
            "Support",
            "Share of the coordinates that the update touches, and how much the sites chose "
            "the same ones.",
            (
                (f"loco_union_density_ratio{{{ALL}}}", "union density"),
                (f"loco_support_overlap_ratio{{{ALL}}}", "overlap"),
            ),
            unit="percentunit",
        ),
        lines(
            "Update norm",
            "Euclidean norm of the update.",
            ((f"loco_update_norm{{{ALL}}}", "{{instance}}"),),
            unit="none",
        ),
    ]


def _process() -> list[Panel]:
    return [
        lines(
            "Refusals",
            "By reason, a minute.",
            (
                (
                    f"60 * sum by (reason) (rate(loco_rejections_total{{{ALL}}}[{RATE}]))",
                    "{{reason}}",
                ),
            ),
            unit="none",
        ),
        lines(
            "Decoding an uploaded shard",
            "Mean duration.",
            ((_mean("loco_decode_seconds", "instance"), "{{instance}}"),),
            unit="s",
        ),
        lines(
            "CPU",
            "Cores in use.",
            ((f"rate(process_cpu_seconds_total{{{ALL}}}[{RATE}])", "{{instance}}"),),
            unit="none",
        ),
        lines(
            "Disk",
            "State directory, and what is free.",
            (
                (f"loco_state_bytes{{{ALL}}}", "state"),
                (f"loco_state_disk_free_bytes{{{ALL}}}", "free"),
            ),
            unit="decbytes",
        ),
    ]


def _settings() -> list[Panel]:
    return [
        lines(
            "Values kept of each chunk",
            "k, as the schedule or an operator has it.",
            ((f"loco_values_per_chunk{{{ALL}}}", "k"),),
            unit="none",
        ),
        lines(
            "Orders",
            "Of operators, in the last hour.",
            ((f"sum by (order) (increase(loco_orders_total{{{ALL}}}[1h]))", "{{order}}"),),
            unit="none",
        ),
    ]
