"""Sites: one site or several, chosen above, in depth."""

from grafana_foundation_sdk.builders import dashboard
from panels import RATE, SITES, Panel, board, by_site, filled, lines

PHASE = "loco_site_phase_seconds_total"


def sites() -> dashboard.Dashboard:
    made = board("loco-sites", "loco / Sites", __doc__ or "", site=True)
    return filled(
        made,
        ("Now", _now()),
        ("How fast", _speed()),
        ("How well", _learning()),
        ("Ranks that come and go", _members()),
    )


def _now() -> list[Panel]:
    return [
        by_site(
            "Sites",
            "As they stand now.",
            (
                (f"loco_site_alive{{{SITES}}}", "alive"),
                (f"loco_site_round{{{SITES}}}", "round"),
                (f"loco_site_rounds_included_total{{{SITES}}}", "included"),
                (f"loco_site_rounds_missed_total{{{SITES}}}", "missed"),
                (f"loco_tokens_total{{{SITES}}}", "tokens"),
                (f"loco_train_bits_per_byte{{{SITES}}}", "loss"),
                (f"loco_inner_step_seconds{{{SITES}}}", "inner step, s"),
                (f"loco_ef_norm{{{SITES}}}", "EF norm"),
                (f"loco_contribution_bytes{{{SITES}}}", "contribution, bytes"),
            ),
        ),
    ]


def _speed() -> list[Panel]:
    return [
        lines(
            "Time by phase",
            "Share of the time of the chosen sites.",
            (
                (
                    f"sum by (site, phase) (rate({PHASE}{{{SITES}}}[{RATE}]))",
                    "{{site}} {{phase}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
        ),
        lines(
            "Inner step",
            "Mean of the last round.",
            ((f"loco_inner_step_seconds{{{SITES}}}", "{{site}}"),),
            unit="s",
        ),
        lines(
            "Tokens a second",
            "In included contributions.",
            ((f"rate(loco_tokens_total{{{SITES}}}[{RATE}])", "{{site}}"),),
            unit="short",
        ),
        lines(
            "Inner steps a second",
            "As the site reports them.",
            ((f"rate(loco_inner_steps_total{{{SITES}}}[{RATE}])", "{{site}}"),),
            unit="none",
        ),
        lines(
            "Encode and apply",
            "Seconds a second spent in the codec.",
            (
                (
                    f'rate({PHASE}{{{SITES},phase=~"encode|apply"}}[{RATE}])',
                    "{{site}} {{phase}}",
                ),
            ),
            unit="percentunit",
        ),
    ]


def _learning() -> list[Panel]:
    return [
        lines(
            "Training loss",
            "Bits per byte, mean of the last round.",
            ((f"loco_train_bits_per_byte{{{SITES}}}", "{{site}}"),),
            unit="none",
            low=None,
        ),
        lines(
            "Error feedback",
            "Norm of what the site has not yet sent. It levels off after about 1 / (1 - beta) "
            "rounds; one that keeps growing means that k is too small or the site diverges.",
            ((f"loco_ef_norm{{{SITES}}}", "{{site}}"),),
            unit="none",
        ),
        lines(
            "Gradient norm",
            "Of the last inner step of each round, before clipping.",
            ((f"loco_grad_norm{{{SITES}}}", "{{site}}"),),
            unit="none",
        ),
        lines(
            "Mask density",
            "Share of the gradient's positions that the ranks of a site exchange; below 1 with "
            "SCAPE.",
            ((f"loco_mask_density_ratio{{{SITES}}}", "{{site}}"),),
            unit="percentunit",
        ),
        lines(
            "Rounds missed, mismatches, non-finite, checkpoints",
            "Increase over an hour.",
            (
                (f"increase(loco_site_rounds_missed_total{{{SITES}}}[1h])", "{{site}} missed"),
                (f"increase(loco_digest_mismatches_total{{{SITES}}}[1h])", "{{site}} digest"),
                (f"increase(loco_non_finite_total{{{SITES}}}[1h])", "{{site}} non-finite"),
                (
                    f"increase(loco_skipped_steps_total{{{SITES}}}[1h])",
                    "{{site}} skipped steps",
                ),
                (
                    f"increase(loco_failed_checkpoints_total{{{SITES}}}[1h])",
                    "{{site}} checkpoints not written",
                ),
            ),
            unit="none",
        ),
    ]


def _members() -> list[Panel]:
    """Of sites that run with --fault-tolerance torchft; docs/torchft.md."""
    return [
        lines(
            "Members",
            "Ranks that make inner steps; 0 where they cannot come and go.",
            ((f"loco_site_members{{{SITES}}}", "{{site}}"),),
            unit="none",
        ),
        lines(
            "Accidents",
            "In the last hour: changes of members, and steps given up and made again.",
            (
                (f"increase(loco_member_changes_total{{{SITES}}}[1h])", "{{site}} changes"),
                (f"increase(loco_failed_commits_total{{{SITES}}}[1h])", "{{site}} given up"),
            ),
            unit="none",
        ),
        lines(
            "A quorum",
            "Mean time of the question who is there, which every step asks.",
            (
                (
                    f"rate(loco_quorum_seconds_total{{{SITES}}}[{RATE}])"
                    # A static site asks nobody: 0, not 0 / 0.
                    f" / clamp_min(rate(loco_quorums_total{{{SITES}}}[{RATE}]), 1e-9)",
                    "{{site}}",
                ),
            ),
            unit="s",
        ),
        lines(
            "Healed",
            "Bytes a second of state that new ranks take from others.",
            ((f"rate(loco_healed_bytes_total{{{SITES}}}[{RATE}])", "{{site}}"),),
            unit="Bps",
        ),
        lines(
            "Lost",
            "Share of what one rank alone held that was lost when members last changed.",
            ((f"loco_shard_lost_fraction{{{SITES}}}", "{{site}}"),),
            unit="percentunit",
        ),
    ]
