"""The site's own lighthouse when it cannot live: started again, and not all the time.

Compared with: the processes that are started and what is said of them, with a port that is taken.
Run alone: pytest tests/worker/elastic/test_supervisor.py
"""

from __future__ import annotations

import socket
import time

import pytest
from support.live import eventually

from loco.processes import stop_all
from worker.elastic import supervisor
from worker.elastic.host import listens
from worker.elastic.quorum import Member
from worker.options import Elastic, Options

pytest.importorskip("torchft", reason="torchft has no wheel for this machine")

OPTIONS = Options(
    coordinator="127.0.0.1:1", site="paris", data=None, device="cpu", patience_seconds=1.0,
    threads=1, metrics=None, checkpoint=None, checkpoint_every_rounds=1, link_mbit=None,
    elastic=Elastic(
        lighthouse=None, local_ranks=1, first_rank=0, site_ranks=1, interface="127.0.0.1",
        rank_timeout_seconds=1.0, heal_seconds=1.0, shard_backup=False, max_restarts=0,
    ),
)  # fmt: skip


def test_a_lighthouse_whose_port_is_taken_is_not_started_again_at_once(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a pause it was every 50 ms, with a warning each."""
    site = supervisor._Supervisor(OPTIONS)
    monkeypatch.setattr(supervisor, "LIGHTHOUSE_PAUSE_SECONDS", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        site._address = f"127.0.0.1:{taken.getsockname()[1]}"
        site._keep_lighthouse()
        first = site._lighthouse
        assert first is not None
        assert first.wait(60.0) != 0
        for _ in range(10):
            site._keep_lighthouse()
            time.sleep(supervisor.POLL_SECONDS)
            assert site._lighthouse is first
    assert "starting it again" not in caplog.text
    assert "cannot listen on" in capfd.readouterr().err

    monkeypatch.setattr(supervisor, "LIGHTHOUSE_PAUSE_SECONDS", 0.0)  # the pause is over
    lighthouse = Member(0, site._address, "")
    try:
        eventually(lambda: site._keep_lighthouse() or listens(lighthouse), "it listens", 60.0)
        site._keep_lighthouse()
        assert caplog.text.count("starting it again") == 1
    finally:
        stop_all([site._lighthouse] if site._lighthouse else [])
