"""Coordinator: rounds, the outer step, refusals, and the process itself."""

from grafana_foundation_sdk.builders import dashboard
from panels import ALL, RATE, board, lines, number


def _quantile(metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile(0.9, sum by ({labels}) (rate({metric}_bucket{{{ALL}}}[{RATE}])))"


def _mean(metric: str, by: str) -> str:
    total, count = (
        f"sum by ({by}) (rate({metric}_{part}{{{ALL}}}[{RATE}]))" for part in ("sum", "count")
    )
    return f"{total} / {count}"


def coordinator() -> dashboard.Dashboard:
    return (
        board("loco-coordinator", "loco / Coordinator", __doc__ or "", site=False)
        .with_panel(
            number(
                "Disk free",
                "Of the file system of the state directory.",
                f"loco_state_disk_free_bytes{{{ALL}}} / loco_state_disk_size_bytes{{{ALL}}}",
                unit="percentunit",
                steps=((None, "red"), (0.1, "yellow"), (0.2, "green")),
                runbook="locodiskfillsup",
            )
        )
        .with_panel(
            number(
                "State",
                "Bytes of the state directory.",
                f"loco_state_bytes{{{ALL}}}",
                unit="decbytes",
            )
        )
        .with_panel(
            number(
                "Memory",
                "Resident.",
                f"process_resident_memory_bytes{{{ALL}}}",
                unit="decbytes",
            )
        )
        .with_panel(
            number(
                "Up for",
                "Since the process started.",
                f"time() - process_start_time_seconds{{{ALL}}}",
                unit="s",
                decimals=0,
            )
        )
        .with_panel(number("H", "Inner steps a round.", f"loco_inner_steps_per_round{{{ALL}}}"))
        .with_panel(
            number("alpha", "Outer learning rate.", f"loco_outer_alpha{{{ALL}}}", decimals=3)
        )
        .with_panel(
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
            )
        )
        .with_panel(
            lines(
                "Phases at the sites",
                "90th percentile of the duration of one phase of a round, over all sites.",
                ((_quantile("loco_phase_seconds", "phase"), "{{phase}}"),),
                unit="s",
            )
        )
        .with_panel(
            lines(
                "Support",
                "Share of the coordinates that the update touches, and how much the sites chose "
                "the same ones.",
                (
                    (f"loco_union_density_ratio{{{ALL}}}", "union density"),
                    (f"loco_support_overlap_ratio{{{ALL}}}", "overlap"),
                ),
                unit="percentunit",
            )
        )
        .with_panel(
            lines(
                "Update norm",
                "Euclidean norm of the update.",
                ((f"loco_update_norm{{{ALL}}}", "{{instance}}"),),
                unit="none",
            )
        )
        .with_panel(
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
            )
        )
        .with_panel(
            lines(
                "Decoding an uploaded shard",
                "Mean duration.",
                ((_mean("loco_decode_seconds", "instance"), "{{instance}}"),),
                unit="s",
            )
        )
        .with_panel(
            lines(
                "CPU",
                "Cores in use.",
                ((f"rate(process_cpu_seconds_total{{{ALL}}}[{RATE}])", "{{instance}}"),),
                unit="none",
            )
        )
        .with_panel(
            lines(
                "Disk",
                "State directory, and what is free.",
                (
                    (f"loco_state_bytes{{{ALL}}}", "state"),
                    (f"loco_state_disk_free_bytes{{{ALL}}}", "free"),
                ),
                unit="decbytes",
            )
        )
        .with_panel(
            lines(
                "Values kept of each chunk",
                "k, as the schedule or an operator has it.",
                ((f"loco_values_per_chunk{{{ALL}}}", "k"),),
                unit="none",
            )
        )
        .with_panel(
            lines(
                "Orders",
                "Of operators, in the last hour.",
                ((f"sum by (order) (increase(loco_orders_total{{{ALL}}}[1h]))", "{{order}}"),),
                unit="none",
            )
        )
    )
