"""The coordinator's own credentials: what it refuses to start with, and what it takes up later.

Compared with: files of a real authority. Serving and revoking over the wire is in test_gate.py and
tests/integration/test_tls.py. Run alone: pytest tests/coordinator/test_keys.py
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import pytest
from support.certs import HOUR, Certs

from coordinator import keys
from coordinator.keys import REVOKED, Keys
from coordinator.refused import RefusedRequest
from loco.certs.bundle import read_bundle
from loco.errors import ConfigError, RefusedError


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certs:
    monkeypatch.setattr(keys, "_LOOK_SECONDS", 0.0)  # look at the files each time
    return Certs(tmp_path / "certs")


def is_revoked(own: Keys, path: Path) -> bool:
    try:
        own.check(read_bundle(path).identity)
    except RefusedRequest as refused:
        return refused.reason == "revoked"
    return False


def test_it_starts_only_with_a_coordinators_sound_bundle(certs: Certs, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the bundle of site 'paris': a coordinator needs"):
        Keys(certs.bundle("paris"))
    for begin, end, says in ((-2, -1, "has expired"), (1, 2, "is not valid yet")):
        odd = certs.odd(
            "coordinator",
            role="coordinator",
            hosts=("localhost",),
            begin=timedelta(hours=begin),
            end=timedelta(hours=end),
        )
        with pytest.raises(RefusedError, match=says):
            Keys(odd)
    strangers = Certs(tmp_path / "strangers")
    list_ = certs.coordinator.with_name(REVOKED)
    list_.write_bytes(strangers.coordinator.with_name(REVOKED).read_bytes())
    with pytest.raises(ConfigError, match="was not signed by the coordinator's own authority"):
        certs.keys()


def test_without_a_list_nothing_is_revoked_and_the_log_says_so(
    certs: Certs, caplog: pytest.LogCaptureFixture
) -> None:
    certs.coordinator.with_name(REVOKED).unlink()
    paris = certs.bundle("paris")  # the authority writes its list anew
    certs.coordinator.with_name(REVOKED).unlink()
    with caplog.at_level(logging.WARNING, "loco.coordinator"):
        own = certs.keys()
    assert "no certificate is taken for revoked" in caplog.text
    assert not is_revoked(own, paris)
    certs.authority.revoke("paris")
    assert is_revoked(own, paris)


def test_a_spoiled_list_leaves_the_old_one_in_force(
    certs: Certs, caplog: pytest.LogCaptureFixture
) -> None:
    """Else whoever can break the file could bring a revoked site back."""
    paris, oslo = certs.bundle("paris"), certs.bundle("oslo")
    certs.authority.revoke("paris")
    own = certs.keys()
    assert is_revoked(own, paris)
    with caplog.at_level(logging.ERROR, "loco.coordinator"):
        certs.coordinator.with_name(REVOKED).write_text("half a fi")
        assert is_revoked(own, paris)
        assert not is_revoked(own, oslo)
        certs.coordinator.with_name(REVOKED).unlink()
        assert is_revoked(own, paris)
    assert caplog.text.count("the old ones stay") == 2


def test_a_renewed_bundle_is_taken_up_and_another_role_is_not(certs: Certs) -> None:
    own = certs.keys()
    before = own.bundle.identity.serial
    certs.coordinator.write_bytes(certs.bundle("paris").read_bytes())
    own.look()
    assert own.bundle.identity.serial == before
    expired = certs.odd(
        "late", role="coordinator", hosts=("localhost",), begin=-2 * HOUR, end=-HOUR
    )
    certs.coordinator.write_bytes(expired.read_bytes())
    own.look()
    assert own.bundle.identity.serial == before, "sites would be locked out"
    certs.authority.issue("coordinator", role="coordinator")
    own.look()
    assert own.bundle.identity.serial != before


def test_whoever_is_revoked_beside_a_spoiled_bundle_stays_out(certs: Certs) -> None:
    paris, own = certs.bundle("paris"), certs.keys()
    certs.coordinator.write_bytes(paris.read_bytes())
    certs.authority.revoke("paris")
    assert is_revoked(own, paris)
