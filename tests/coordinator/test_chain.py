"""The signed history: what may not be changed, left out, exchanged or forged, and who finds it.

Compared with: the bytes of a real run's files, signatures by the cryptography package. Run alone:
pytest tests/coordinator/test_chain.py
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.numpy_site import NumpySite
from support.certs import Certs
from support.disk import files_up_to
from support.live import Coordinator, coordinating
from support.runs import LAYOUT, config_of, create_store

from coordinator.chain import FILE, Chain, read, sha256_of
from coordinator.check import check_state
from coordinator.store import Store
from loco.certs.authority import read_authority
from loco.chain import FIRST, Entry, Fact, sign, verify
from loco.errors import LocoError, RefusedError
from loco.wire.access import Access
from loco.wire.v1 import coordinator_pb2 as pb

ROUNDS = 3
CONFIG = config_of(
    quorum={"min_sites": 1}, run={"rounds": ROUNDS}, state={"snapshot_every_rounds": 2}
)
FACT = Fact(run_id="r", kind="update", round=3, sha256="ab" * 32, size_bytes=9, theta_digest="cd")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("certs") / "certs")


def run_to_the_end(coordinator: Coordinator, certs: Certs | None) -> NumpySite:
    access = Access(bundle=certs.bundle("paris")) if certs else None
    site = NumpySite(coordinator.address, "paris", LAYOUT, access=access)
    site.run()
    return site


@pytest.fixture
def finished(tmp_path: Path, certs: Certs) -> Path:
    """The state directory of a finished, signed run."""
    with coordinating(create_store(tmp_path, CONFIG), certs) as coordinator:
        run_to_the_end(coordinator, certs)
    return tmp_path


# --- one entry ------------------------------------------------------------------------------------


def signed(certs: Certs, fact: Fact = FACT, previous: bytes = FIRST) -> Entry:
    from cryptography.hazmat.primitives.serialization import Encoding

    bundle = certs.keys().bundle
    entry = Entry(body=fact.to_json(), previous=previous)
    return sign(entry, bundle.key, bundle.certificate.public_bytes(Encoding.DER))


def test_a_signed_entry_gives_its_fact(certs: Certs) -> None:
    assert verify(signed(certs), certs.authority.certificate) == FACT


def spoiled(entry: Entry) -> Iterator[Entry]:
    for field in dataclasses.fields(FACT):
        value = getattr(FACT, field.name)
        other = value + 1 if isinstance(value, int) else value + "0"
        body = dataclasses.replace(FACT, **{field.name: other}).to_json()
        yield dataclasses.replace(entry, body=body)
    yield dataclasses.replace(entry, previous=bytes([1, *FIRST[1:]]))
    yield dataclasses.replace(entry, signature=entry.signature[:-1])
    yield dataclasses.replace(entry, signature=b"")
    yield dataclasses.replace(entry, certificate=b"")
    yield dataclasses.replace(entry, certificate=entry.certificate[:-9])
    yield dataclasses.replace(entry, body="[]")


def test_whatever_is_changed_is_found(certs: Certs) -> None:
    for entry in spoiled(signed(certs)):
        with pytest.raises(LocoError):
            verify(entry, certs.authority.certificate)


def test_only_a_coordinator_of_the_authority_can_sign(certs: Certs, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding

    from loco.certs.bundle import read_bundle

    strangers = Certs(tmp_path / "strangers")
    with pytest.raises(LocoError, match="does not carry the signature of a coordinator of this"):
        verify(signed(strangers), certs.authority.certificate)
    paris = read_bundle(certs.bundle("paris"))
    entry = Entry(body=FACT.to_json(), previous=FIRST)
    forged = sign(entry, paris.key, paris.certificate.public_bytes(Encoding.DER))
    with pytest.raises(LocoError, match="signed by a site"):
        verify(forged, certs.authority.certificate)


# --- a run's chain --------------------------------------------------------------------------------


def test_every_update_and_snapshot_of_a_run_has_its_signed_entry(
    finished: Path, certs: Certs
) -> None:
    entries = list(read(finished / FILE))
    facts = [verify(entry, certs.authority.certificate) for entry in entries]
    told = [(fact.kind, fact.round) for fact in facts]
    assert told == [
        ("snapshot", 0), ("update", 0), ("update", 1), ("snapshot", 2), ("update", 2),
        ("snapshot", 3),
    ]  # fmt: skip
    assert [entry.previous for entry in entries] == [FIRST, *(e.hash for e in entries[:-1])]
    for fact in facts:
        if fact.kind == "update":
            assert fact.sha256 == sha256_of(finished / "updates" / str(fact.round))
    verdict = check_state(finished, certs.authority.certificate)
    assert (verdict.faults, verdict.entries, verdict.signed) == ([], 6, 6)


def test_a_run_that_goes_on_continues_its_chain(tmp_path: Path, certs: Certs) -> None:
    with coordinating(create_store(tmp_path, CONFIG), certs) as coordinator:
        site = NumpySite(
            coordinator.address, "paris", LAYOUT, access=Access(bundle=certs.bundle("paris"))
        )
        site.join()
        while site.round < 1:
            site.follow()
        site.close()
    with (tmp_path / FILE).open("ab") as chain:
        chain.write(b'{"body": "torn by a cra')
    with coordinating(Store.open(tmp_path), certs) as coordinator:
        run_to_the_end(coordinator, certs)
    verdict = check_state(tmp_path, certs.authority.certificate)
    assert (verdict.faults, verdict.entries) == ([], 6)


def test_a_disk_that_fills_up_in_the_middle_of_a_line_leaves_no_part_of_it(
    tmp_path: Path, certs: Certs
) -> None:
    """Tried again when there is room, as the coordinator does; then a restart reads it."""
    file = tmp_path / "update"
    file.write_bytes(b"an update")
    chain = Chain(tmp_path, "r", certs.keys(), remembered=9)
    chain.add("update", 0, file, "theta1")
    before = (tmp_path / FILE).read_bytes()
    with files_up_to(len(before) + 100), pytest.raises(OSError, match="File too large"):
        chain.add("update", 1, file, "theta2")
    assert (tmp_path / FILE).read_bytes() == before
    chain.add("update", 1, file, "theta2")
    again = Chain(tmp_path, "r", certs.keys(), remembered=9)
    assert [entry.fact.round for entry in read(tmp_path / FILE)] == [0, 1]
    assert again.get("update", 1) == chain.get("update", 1)


def test_a_plaintext_run_has_a_chain_without_signatures(tmp_path: Path, certs: Certs) -> None:
    with coordinating(create_store(tmp_path, CONFIG)) as coordinator:
        run_to_the_end(coordinator, None)
    verdict = check_state(tmp_path)
    assert (verdict.faults, verdict.entries, verdict.signed) == ([], 6, 0)
    assert len(check_state(tmp_path, certs.authority.certificate).faults) == 6


def test_other_bytes_for_a_round_that_has_its_entry_are_an_error(
    finished: Path, certs: Certs
) -> None:
    chain = Chain(finished, "test-run", certs.keys(), 100)
    update = finished / "updates" / "1"
    theta_digest = chain._entries["update", 1].fact.theta_digest
    before = (finished / FILE).read_bytes()
    chain.add("update", 1, update, theta_digest)
    assert (finished / FILE).read_bytes() == before
    update.write_bytes(update.read_bytes() + b"x")
    with pytest.raises(LocoError, match="update 1 is not what"):
        chain.add("update", 1, update, theta_digest)


def lines(directory: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (directory / FILE).read_text().splitlines()]


def write(directory: Path, entries: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (directory / FILE).write_text(text)


def test_state_check_finds_an_entry_that_is_missing_exchanged_or_forged(
    finished: Path, certs: Certs
) -> None:
    whole, authority = lines(finished), read_authority(certs.coordinator.with_name("ca.pem"))

    def faults(entries: list[dict[str, str]]) -> str:
        write(finished, entries)
        return "; ".join(check_state(finished, authority).faults)

    assert "does not follow" in faults([*whole[:1], *whole[2:]])
    assert "lacks update 0" in faults([*whole[:1], *whole[2:]])
    assert "lacks snapshot 3" in faults(whole[:-1])
    assert "does not follow" in faults([whole[1], whole[0], *whole[2:]])
    other = whole[1]["body"].replace('"size_bytes":', '"size_bytes":1')
    assert "signature" in faults([whole[0], {**whole[1], "body": other}, *whole[2:]])
    unsigned = {**whole[1], "signature": base64.b64encode(b"").decode()}
    assert "not signed" in faults([whole[0], unsigned, *whole[2:]])
    assert "line 2" in faults([whole[0], {"body": "?"}, *whole[2:]])
    assert faults(whole) == ""
    (finished / FILE).unlink()
    assert "lacks update 0" in "; ".join(check_state(finished, authority).faults)


# --- what a site checks ---------------------------------------------------------------------------


def test_a_site_refuses_history_that_the_coordinator_has_not_signed(
    tmp_path: Path, certs: Certs
) -> None:
    with coordinating(create_store(tmp_path, CONFIG), certs) as coordinator:
        access = Access(bundle=certs.bundle("paris"))
        site = NumpySite(coordinator.address, "paris", LAYOUT, access=access)
        site.join()
        held = site.digest
        site.follow()
        answer = site.session.next_directive(0, held)
        while answer.directive != pb.DIRECTIVE_UPDATE:
            answer = site.session.next_directive(0, held)
        update = bytes(site.session.pull(0, range(answer.update_bytes)))
        site.session.check_update(answer.entry, 0, update)
        for wrong, says in (
            (lambda: site.session.check_update(answer.entry, 0, update + b"x"), "is not what"),
            (lambda: site.session.check_update(answer.entry, 1, update), "update 0 of run"),
            (lambda: site.session.check_snapshot(answer.entry, 0, held), "where snapshot 0"),
            (lambda: site.session.check_update(pb.SignedEntry(), 0, update), "malformed"),
        ):
            with pytest.raises(LocoError, match=says) as caught:
                wrong()
            assert not isinstance(caught.value, RefusedError)
        site.close()
