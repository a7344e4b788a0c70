"""The WAN benchmark on an emulated network: its figures against what the line allows.

Run alone: pytest tests/benchmarks/test_wan.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.path.exists("/dev/net/tun"), reason="needs root and TUN"
    ),
]

RTT_SECONDS, H, ROUNDS = 0.04, 3, 5


def test_ours_against_ours_over_a_slow_line() -> None:
    command = [
        sys.executable, "-m", "benchmarks.wan", "--method", "blocking", "dense", "--json",
        "--mbit", "20", "--rtt-ms", str(1e3 * RTT_SECONDS), "--params", "100e3",
        "--step-ms", "10", "--inner-steps", str(H), "--rounds", str(ROUNDS),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    methods = json.loads(done.stdout)["methods"]
    ours, dense = methods["blocking"], methods["dense"]
    for row in methods.values():
        assert row["rounds"] == ROUNDS - 3  # two warm up, the last one has no next
        assert row["sync_seconds"] > RTT_SECONDS  # a push, and the update in answer
        assert 0 < row["compute_utilisation"] < 1
    # 16 times at least: 64 of 4096 values, about 9 bits each, small messages included
    assert 16 * ours["wire_bytes_up"] < dense["wire_bytes_up"]
    assert dense["sync_seconds"] > 8 * dense["wire_bytes_up"] / 20e6  # no faster than the line
