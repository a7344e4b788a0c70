"""Bandwidth: what crosses the wide-area links, by site and direction."""

from grafana_foundation_sdk.builders import dashboard
from panels import RATE, SITES, board, lines, number

WIRE = f"loco_wire_bytes_total{{{SITES}}}"


def _total(wire: str) -> str:
    """Bytes in the range, with what a site sent before it was scraped first: increase() leaves that
    out, and it is the whole snapshot of a new site."""
    grown = f"sum by (direction) (increase({wire}[$__range]))"
    first = f"min_over_time({wire}[$__range]) unless {wire} offset $__range"
    return f"{grown} + (sum by (direction) ({first}) or 0 * {grown})"


def bandwidth() -> dashboard.Dashboard:
    made = board("loco-bandwidth", "loco / Bandwidth", __doc__ or "", site=True)
    for direction, word in (("up", "sent"), ("down", "received")):
        made.with_panel(
            number(
                f"{word.capitalize()}, range",
                f"Bytes {word} by the sites in the range shown, all kinds.",
                _total(f'loco_wire_bytes_total{{{SITES},direction="{direction}"}}'),
                unit="decbytes",
                width=6,
            )
        )
    for direction, what in (("up", "contribution"), ("down", "update")):
        made.with_panel(
            number(
                f"Dense over {direction}",
                f"How many times smaller the last {what}s are than dense fp32.",
                f'loco_compression_ratio{{direction="{direction}",instance=~"$instance"}}',
                unit="none",
                decimals=0,
                width=6,
            )
        )
    for direction, word in (("up", "Up"), ("down", "Down")):
        wire = f'loco_wire_bytes_total{{{SITES},direction="{direction}"}}'
        made.with_panel(
            lines(
                f"{word}",
                "Bytes a second, as the coordinator hands them to and gets them from gRPC.",
                ((f"sum by (site) (rate({wire}[{RATE}]))", "{{site}}"),),
                unit="Bps",
            )
        )
    return (
        made.with_panel(
            lines(
                "By kind",
                "Rounds are contributions and updates; snapshots are joins; control is the rest.",
                (
                    (
                        f"sum by (direction, kind) (rate({WIRE}[{RATE}]))",
                        "{{kind}} {{direction}}",
                    ),
                ),
                unit="Bps",
                stacked=True,
            )
        )
        .with_panel(
            lines(
                "A round",
                "Payload of the last contribution of each site, of the last update, and of a dense "
                "contribution for comparison.",
                (
                    (f"loco_contribution_bytes{{{SITES}}}", "{{site}} up"),
                    ('loco_update_bytes{instance=~"$instance"}', "down"),
                    ('loco_dense_bytes{instance=~"$instance"}', "dense fp32"),
                ),
                unit="decbytes",
                log=True,
                low=None,
            )
        )
        .with_panel(
            lines(
                "Link utilisation",
                "Rate over the link's rate: as its operator stated it (--link-mbit), else the "
                "highest goodput measured. Above 90 % for long, the link bounds the site.",
                (
                    (
                        f"sum without (kind) (rate({WIRE}[{RATE}])) "
                        f"/ loco_link_rate_bytes_per_second{{{SITES}}}",
                        "{{site}} {{direction}}",
                    ),
                ),
                unit="percentunit",
                steps=((None, "transparent"), (0.9, "red")),
            )
        )
        .with_panel(
            lines(
                "Goodput",
                "Payload bytes a second while a transfer goes on.",
                ((f"loco_link_goodput_bytes_per_second{{{SITES}}}", "{{site}} {{direction}}"),),
                unit="Bps",
            )
        )
        .with_panel(
            lines(
                "Time to transfer",
                "Seconds a round that a site pushes and pulls.",
                (
                    (
                        "sum by (site, phase) (rate(loco_site_phase_seconds_total{"
                        f'{SITES},phase=~"push|pull"}}[{RATE}])) '
                        "/ on (site) group_left () sum by (site) "
                        f"(rate(loco_site_rounds_included_total{{{SITES}}}[{RATE}]))",
                        "{{site}} {{phase}}",
                    ),
                ),
                unit="s",
            )
        )
        .with_panel(
            lines(
                "Bits a sent value",
                "All in: positions, values, headers.",
                (('loco_bits_per_value{instance=~"$instance"}', "{{direction}}"),),
                unit="none",
            )
        )
        .with_panel(
            lines(
                "Trouble on the way",
                "Calls tried again and bytes that a broken download did not fetch again, a second.",
                (
                    (f"rate(loco_retries_total{{{SITES}}}[{RATE}])", "{{site}} retries"),
                    (
                        f"rate(loco_resumed_bytes_total{{{SITES}}}[{RATE}])",
                        "{{site}} resumed bytes",
                    ),
                ),
                unit="none",
            )
        )
        .with_panel(
            lines(
                "Inside the site",
                "Bytes a second that the ranks hand to collectives.",
                ((f"rate(loco_in_site_bytes_total{{{SITES}}}[{RATE}])", "{{site}}"),),
                unit="Bps",
            )
        )
    )
