"""`loco doctor` and its probe against a real coordinator: what it finds, refuses, and leaves alone.

Run alone: pytest tests/loco/test_doctor.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.certs import Certs
from support.corpora import prepared
from support.live import Coordinator, Member, coordinating
from support.runs import config_of, create_store, vector

from loco.doctor import machine
from loco.doctor.examine import Options, examine
from loco.doctor.machine import check_disk, check_machine
from loco.errors import ConfigError, RefusedError
from loco.model import build_model, layout_of
from loco.wire.access import Access, Link
from loco.wire.probe import measure
from loco.wire.protocol import PROBE_BYTES, PROTOCOL_VERSION
from loco.wire.v1 import coordinator_pb2 as pb

CONFIG = config_of(
    model={"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 64},
    data={"corpus": "sotu", "sites": {"oslo": "/no/such/text"}},
    quorum={"quarantine_after": 1},
)
LAYOUT = layout_of(build_model(CONFIG.model, seed=0))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Coordinator]:
    store = create_store(tmp_path / "state", CONFIG, layout=LAYOUT, theta=vector(LAYOUT, seed=0))
    with coordinating(store) as coordinator:
        yield coordinator


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Coordinator]:
    store = create_store(tmp_path / "state", CONFIG, layout=LAYOUT, theta=vector(LAYOUT, seed=0))
    with coordinating(store, Certs(tmp_path / "certs")) as coordinator:
        yield coordinator


def options(coordinator: Coordinator, **changes: Any) -> Options:
    given = Options(
        coordinator=coordinator.address,
        site="paris",
        access=Access(),
        ranks=2,
        data=None,
        checkpoint=None,
        step_seconds=1.0,
    )
    return replace(given, **changes)


def examined(
    options_: Options, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, dict[str, str]], dict[str, Any]]:
    """(exit code, findings by check, the whole document)."""
    code = examine(options_, as_json=True)
    document = json.loads(capsys.readouterr().out)
    return code, {found["check"]: found for found in document["findings"]}, document


def test_a_corpus_of_another_tokenizer_is_found(
    plain: Coordinator, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its vocabulary is that of the run's bytes, so only the tokenizer tells."""
    data = str(prepared(tmp_path / "data", tokenizer="3" * 32))
    code, found, _ = examined(options(plain, data=data), capsys)
    assert code == 2
    assert (found["train data"]["state"], found["validation data"]["state"]) == ("ok", "fail")
    assert "that of corpus 'sotu' is bytes" in found["validation data"]["message"]


def test_a_machine_that_is_ready(plain: Coordinator, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, document = examined(options(plain), capsys)
    assert code == 0, found
    assert set(found) >= {
        "security", "coordinator", "site", "version", "clock", "link", "versions", "device", "gloo",
        "torchft", "model", "train data", "validation data", "disk", "prediction",
    }  # fmt: skip
    assert all(f["remedy"] for f in found.values() if f["state"] != "ok")
    assert found["gloo"]["state"] == "ok"
    assert found["model"]["message"] == f"{LAYOUT.num_parameters:,} parameters"
    assert "utilisation" in found["prediction"]["message"]
    assert 0 < document["rtt_seconds"] < 5
    assert abs(document["clock_offset_seconds"]) <= document["rtt_seconds"]
    assert document["up_bytes_per_second"] > 1e5
    assert document["down_bytes_per_second"] > 1e5
    assert plain.state.sites == {}  # it did not join


def test_without_a_step_time_no_utilisation_is_claimed(
    plain: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found, _ = examined(options(plain, step_seconds=None), capsys)
    assert found["prediction"]["state"] == "warn"
    assert "give --step-seconds" in found["prediction"]["remedy"]
    assert "utilisation of" not in found["prediction"]["message"]


def test_a_site_that_takes_part_already_and_one_without_data(
    plain: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    member = Member(plain, "oslo")
    member.join()
    code, found, _ = examined(options(plain, site="oslo"), capsys)
    assert code == 2
    assert found["site"]["state"] == "warn"
    assert "takes its place" in found["site"]["remedy"]
    assert found["train data"]["state"] == "fail"
    assert "'/no/such/text' does not exist here" in found["train data"]["message"]
    assert found["validation data"]["state"] == "ok"
    assert examined(options(plain, site="oslo", data="sotu:1900-1950"), capsys)[0] == 0


def test_a_model_of_ones_own_is_not_asked_for_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(model={"file": "/only/at/the/coordinator.safetensors"})
    store = create_store(tmp_path / "state", config, layout=LAYOUT, theta=vector(LAYOUT, seed=0))
    with coordinating(store) as coordinator:
        code, found, _ = examined(options(coordinator), capsys)
    assert code == 0, found
    assert f"{LAYOUT.num_parameters:,} parameters" in found["model"]["message"]
    assert "train data" not in found
    assert "utilisation" in found["prediction"]["message"]


def test_an_evicted_site_hears_who_lets_it_in(
    plain: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    member = Member(plain, "paris")
    member.join()
    order = pb.ControlRequest(
        protocol_version=PROTOCOL_VERSION, verb=pb.CONTROL_VERB_EVICT, site="paris"
    )
    member.stub.Control(order)
    code, found, _ = examined(options(plain), capsys)
    assert code == 3
    assert f"loco control {plain.address} readmit paris" in found["site"]["remedy"]


def test_nobody_there_is_exit_4_and_the_machine_is_examined_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nobody = Options(
        coordinator="127.0.0.1:1", site="paris", access=Access(), ranks=1, data=None,
        checkpoint=None, step_seconds=None,
    )  # fmt: skip
    code, found, document = examined(nobody, capsys)
    assert code == 4
    assert found["coordinator"]["state"] == "fail"
    assert {"versions", "gloo"} <= set(found)
    assert document["rtt_seconds"] is None
    assert examine(nobody, as_json=False) == 4
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f["state"] for f in found.values()]


def test_a_certificate_is_named_and_one_of_another_site_refused(
    secured: Coordinator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert secured.certs is not None
    mine = Access(bundle=secured.certs.bundle("paris"))
    code, found, _ = examined(options(secured, access=mine), capsys)
    assert code == 0, found
    assert found["security"]["message"].startswith("certificate of site 'paris', valid from")
    assert found["link"]["state"] == "ok"
    code, found, _ = examined(options(secured, access=mine, site="oslo", data="sotu"), capsys)
    assert code == 3
    assert found["security"]["remedy"] == "use --site paris, or the bundle of oslo"
    code, found, _ = examined(options(secured), capsys)  # plaintext to TLS
    assert code == 4
    assert "speaks TLS and asks for a certificate" in found["coordinator"]["message"]


def test_names_and_addresses_are_checked_first(plain: Coordinator) -> None:
    for changes in ({"site": "Paris!"}, {"ranks": 0}, {"coordinator": "nowhere"}):
        with pytest.raises(ConfigError):
            examine(replace(options(plain), **changes), as_json=True)


# --- the probe ------------------------------------------------------------------------------------


def probe(coordinator: Coordinator, *requests: pb.ProbeRequest) -> list[pb.ProbeResponse]:
    return list(Member(coordinator, "paris").stub.Probe(iter(requests), timeout=20))


def hello(**fields: Any) -> pb.ProbeRequest:
    return pb.ProbeRequest(protocol_version=PROTOCOL_VERSION, **fields)


def test_the_probe_says_what_came_and_sends_what_was_asked_for(plain: Coordinator) -> None:
    before = time.time()
    first, *data = probe(plain, hello(download_bytes=200_000), pb.ProbeRequest(data=b"x" * 70_000))
    assert first.received_bytes == 70_000
    assert before <= first.unix_seconds <= time.time()
    assert sum(len(answer.data) for answer in data) == 200_000


def test_the_probe_is_bounded(plain: Coordinator) -> None:
    answers = probe(plain, hello(download_bytes=100 * PROBE_BYTES))
    assert sum(len(answer.data) for answer in answers) <= PROBE_BYTES
    block = pb.ProbeRequest(data=b"x" * (1 << 20))
    with pytest.raises(grpc.RpcError) as caught:
        probe(plain, hello(), *[block] * 9)
    assert "a probe has at most 8388608 bytes" in str(caught.value.details())
    with pytest.raises(grpc.RpcError) as caught:
        probe(plain, pb.ProbeRequest(protocol_version=99))
    assert "protocol version 99" in str(caught.value.details())
    with pytest.raises(grpc.RpcError):
        probe(plain, pb.ProbeRequest())
    assert probe(plain, hello())  # none of these left it busy


def test_one_probe_at_a_time_and_one_given_up_does_not_block_the_next(plain: Coordinator) -> None:
    stub = Member(plain, "paris").stub

    def never_ending() -> Iterator[pb.ProbeRequest]:
        yield hello()
        time.sleep(1.0)

    call = stub.Probe(never_ending(), timeout=20)
    time.sleep(0.3)
    link = Link(plain.address, Access())
    with pytest.raises(RefusedError, match="another probe is being answered") as caught:
        measure(link)
    assert caught.value.reason == "too_many_calls"
    call.cancel()
    time.sleep(0.3)
    assert measure(link).version
    link.close()


def test_builds_of_one_protocol_may_have_different_names(
    plain: Coordinator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image is 0.1.0, a checkout of the same code 0.1.dev7: both are told, neither is wrong."""
    monkeypatch.setattr("loco.doctor.run.version", lambda _name: "0.0.dev7")
    _, found, _ = examined(options(plain), capsys)
    assert found["version"]["state"] == "ok"
    for part in (f"protocol version {PROTOCOL_VERSION}", "this machine 0.0.dev7", "runs loco"):
        assert part in found["version"]["message"]


def test_readers_may_not_probe(secured: Coordinator) -> None:
    assert secured.certs is not None
    for role, allowed in (("site", True), ("operator", True), ("reader", False)):
        link = Link(secured.address, Access(bundle=secured.certs.bundle(role, role)))
        if allowed:
            assert measure(link).up_bytes_per_second > 0
        else:
            with pytest.raises(RefusedError, match="may not call Probe"):
                measure(link)
        link.close()


# --- the machine ----------------------------------------------------------------------------------


def test_room_for_checkpoints_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * 16 * 1000
    for free, state in ((needed - 1, "fail"), (needed, "warn"), (2 * needed, "ok")):
        usage = type("Usage", (), {"free": free})()
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _path, u=usage: u)
        found = check_disk(tmp_path / "not" / "yet", 1000)
        assert found.state == state
        assert str(tmp_path) in found.message


def test_missing_torchft_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "torchft":
            raise machine.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(machine, "version", version)
    (found,) = (f for f in check_machine() if f.check == "torchft")
    assert found.state == "warn"
    assert "pip install torchft" in found.remedy or "deploy/docker" in found.remedy


def test_a_gpu_that_is_there_and_broken_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts it, and then raises at the first question about it."""

    def broken(_: int) -> str:
        raise RuntimeError(
            "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors ..."
        )

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", broken)
    findings = {found.check: found for found in check_machine()}
    assert findings["device"].state == "fail"
    assert findings["device"].message == (
        "2 GPUs are there and cannot be used: CUDA error: uncorrectable ECC error encountered"
    )
    assert "nvidia-smi" in findings["device"].remedy
    assert "torchft" in findings  # and the rest is examined
