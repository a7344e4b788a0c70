"""Schedules of the outer loop against the values that they are defined by.

pytest tests/loco/outer/test_schedule.py
"""

from __future__ import annotations

from loco.config import CodecConfig, OuterConfig
from loco.outer import alpha_at, k_at, k_of_site


def test_k_falls_geometrically_and_then_stays() -> None:
    codec = CodecConfig(k=64, k_start=1024, k_ramp_rounds=4)
    assert [k_at(codec, round_, 6) for round_ in range(6)] == [1024, 512, 256, 128, 64, 64]


def test_k_without_a_ramp() -> None:
    assert {k_at(CodecConfig(k=32), round_, 3) for round_ in range(3)} == {32}


def test_k_of_the_last_rounds() -> None:
    codec = CodecConfig(k=64, k_end=2048, k_end_rounds=2)
    assert [k_at(codec, round_, 5) for round_ in range(6)] == [64, 64, 64, 2048, 2048, 2048]


def test_the_end_wins_over_a_ramp_that_reaches_it() -> None:
    codec = CodecConfig(k=64, k_start=1024, k_ramp_rounds=4, k_end=300, k_end_rounds=3)
    assert [k_at(codec, round_, 5) for round_ in range(5)] == [1024, 512, 300, 300, 300]
    assert {k_at(codec, round_, 2) for round_ in range(2)} == {300}, "a run of two rounds"


def test_many_sites_share_what_a_few_would_send() -> None:
    sent = [k_of_site(64, 3, sites) for sites in (1, 2, 3, 4, 6, 20, 200, 1000)]
    assert sent == [64, 64, 64, 48, 32, 10, 1, 1]


def test_alpha_is_that_of_the_last_step_reached() -> None:
    outer = OuterConfig(alpha=1.0, alpha_steps={10: 0.65, 20: 0.4})
    found = [alpha_at(outer, round_) for round_ in (0, 9, 10, 19, 20, 99)]
    assert found == [1.0, 1.0, 0.65, 0.65, 0.4, 0.4]
