"""Bandwidth: what crosses the wide-area links, by site and direction."""

from grafana_foundation_sdk.builders import dashboard
from panels import ALL, RATE, SITES, Panel, board, filled, lines, number

WIRE = f"loco_wire_bytes_total{{{SITES}}}"


def _total(wire: str) -> str:
    """Bytes in the range, with what a site sent before it was scraped first: increase() leaves that
    out, and it is the whole snapshot of a new site."""
    grown = f"sum by (direction) (increase({wire}[$__range]))"
    first = f"min_over_time({wire}[$__range]) unless {wire} offset $__range"
    return f"{grown} + (sum by (direction) ({first}) or 0 * {grown})"


def bandwidth() -> dashboard.Dashboard:
    made = board("loco-bandwidth", "loco / Bandwidth", __doc__ or "", site=True)
    return filled(
        made,
        ("Range", _range()),
        ("Up and down", _directions()),
        ("Rates", _rates()),
        ("A round", _rounds()),
    )


def _range() -> list[Panel]:
    totals = [
        number(
            f"{word.capitalize()}, range",
            f"Bytes {word} by the sites in the range shown, all kinds.",
            _total(f'loco_wire_bytes_total{{{SITES},direction="{direction}"}}'),
            unit="decbytes",
            width=6,
        )
        for direction, word in (("up", "sent"), ("down", "received"))
    ]
    ratios = [
        number(
            f"Dense over {direction}",
            f"How many times smaller the last {what}s are than dense fp32.",
            f'loco_compression_ratio{{direction="{direction}",{ALL}}}',
            decimals=0,
            width=6,
        )
        for direction, what in (("up", "contribution"), ("down", "update"))
    ]
    return [*totals, *ratios]


def _directions() -> list[Panel]:
    return [
        lines(
            title,
            "Bytes a second, as the coordinator hands them to and gets them from gRPC.",
            (
                (
                    "sum by (site) (rate(loco_wire_bytes_total{"
                    f'{SITES},direction="{title.lower()}"}}[{RATE}]))',
                    "{{site}}",
                ),
            ),
            unit="Bps",
        )
        for title in ("Up", "Down")
    ]


def _rates() -> list[Panel]:
    return [
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
        ),
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
        ),
        lines(
            "Goodput",
            "Payload bytes a second while a transfer goes on.",
            ((f"loco_link_goodput_bytes_per_second{{{SITES}}}", "{{site}} {{direction}}"),),
            unit="Bps",
        ),
        lines(
            "Inside the site",
            "Bytes a second that the ranks hand to collectives.",
            ((f"rate(loco_in_site_bytes_total{{{SITES}}}[{RATE}])", "{{site}}"),),
            unit="Bps",
        ),
    ]


def _rounds() -> list[Panel]:
    return [
        lines(
            "A round",
            "Payload of the last contribution of each site, of the last update, and of a dense "
            "contribution for comparison.",
            (
                (f"loco_contribution_bytes{{{SITES}}}", "{{site}} up"),
                (f"loco_update_bytes{{{ALL}}}", "down"),
                (f"loco_dense_bytes{{{ALL}}}", "dense fp32"),
            ),
            unit="decbytes",
            log=True,
            low=None,
        ),
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
        ),
        lines(
            "Bits a sent value",
            "All in: positions, values, headers.",
            ((f"loco_bits_per_value{{{ALL}}}", "{{direction}}"),),
            unit="none",
        ),
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
        ),
    ]
