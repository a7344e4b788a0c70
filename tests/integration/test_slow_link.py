"""A slow link is not a dead one: heartbeats pass on 1 Mbit/s that an upload fills.

Compared with: the beats that the coordinator counted while the upload was under way. Run alone:
pytest tests/integration/test_slow_link.py
"""

from __future__ import annotations

import threading
from pathlib import Path

from chaos.numpy_site import NumpySite
from chaos.proxy import Proxy
from support.live import coordinating, eventually
from support.runs import config_of, create_store

from loco.layout import Layout

MEGABIT = 1e6 / 8  # bytes a second
LAYOUT = Layout.of([("weight", (192, 1024))])  # 768 KiB dense: six seconds on this link
HEARTBEAT_SECONDS = 0.5


def test_heartbeats_pass_on_a_full_link(tmp_path: Path) -> None:
    config = config_of(
        codec={"bits": 32},
        outer={"aggregation": "mean"},
        quorum={
            "min_sites": 1,
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "dead_after_seconds": 2 * HEARTBEAT_SECONDS + 0.5,
        },
    )
    with coordinating(create_store(tmp_path, config, layout=LAYOUT)) as coordinator:
        host, port = coordinator.address.split(":")
        proxy = Proxy((host, int(port)))
        site = NumpySite(proxy.address, "paris", LAYOUT)
        site.join()
        beats: list[int] = []
        heartbeat = coordinator.running.monitor.heartbeat

        def count(beat: object) -> None:
            beats.append(proxy.passed["up"])
            heartbeat(beat)  # type: ignore[arg-type]

        coordinator.running.monitor.heartbeat = count  # type: ignore[method-assign]
        begin = proxy.passed["up"]
        proxy.change(bytes_per_second=MEGABIT)
        push = threading.Thread(target=site.follow)
        push.start()
        statuses = set()
        while push.is_alive():
            statuses.add(coordinator.state.sites["paris"].status)
            push.join(0.05)
        assert site.acknowledged == {0}
        size = 4 * LAYOUT.num_parameters
        during = [passed for passed in beats if begin + size * 0.1 < passed < begin + size * 0.9]
        assert len(during) >= 3
        assert "lost" not in statuses
        eventually(lambda: coordinator.state.round == 1, "the round is committed")
        site.close()
        proxy.close()
