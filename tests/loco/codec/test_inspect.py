"""`loco inspect`: its numbers against the payloads they describe; files it cannot use.

Run alone: python -m pytest tests/loco/codec/test_inspect.py
"""

import io
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import typer
from typer.testing import CliRunner

from loco import codec
from loco.codec_inspect import describe, inspect, lines
from loco.errors import ConfigError, PayloadError

app = typer.Typer()
app.command()(inspect)


@pytest.fixture
def a() -> npt.NDArray[np.float32]:
    a = np.random.default_rng(0).standard_normal(12_000).astype(np.float32)
    a[:4096] = 0
    return a


def file_of(a: npt.NDArray[np.float32]) -> bytes:
    """Three payloads, as a contribution file has them one after the other."""
    return (
        codec.encode(a[:8192]).payload
        + codec.encode(a[8192:10_000], bits=1).payload
        + codec.encode_dense(a[10_000:]).payload
    )


def test_parts_add_up_and_histograms_count_every_value(a: npt.NDArray[np.float32]) -> None:
    found = describe(file_of(a))
    assert found["num_elements"] == 12_000
    assert [p["offset"] for p in found["payloads"]] == [
        0,
        *np.cumsum([p["length"] for p in found["payloads"]])[:-1],
    ]
    first, second, dense = found["payloads"]
    for p in (first, second):
        assert sum(p["bits_per_value_by_part"].values()) == pytest.approx(p["bits_per_value"])
        assert sum(p["values"].values()) == p["num_values"]
    assert first["counts"] == {"least": 0, "most": 64, "empty_chunks": 1, "chunks": 2}
    assert second["values"]["+upper"] == second["values"]["-upper"] == 0
    assert dense["bits_per_value"] == pytest.approx(32 + 8 * 40 / 2000)


def test_the_error_is_that_of_what_is_decoded(a: npt.NDArray[np.float32]) -> None:
    error = describe(codec.encode(a).payload, a)["payloads"][0]["error"]
    v = codec.encode(a).dense().numpy().astype(np.float64)
    assert error["relative_error_of_all"] == pytest.approx(np.sum((a - v) ** 2) / np.sum(a**2))
    assert describe(file_of(a), a)["payloads"][2]["error"]["relative_error_of_all"] == 0


def test_an_original_of_another_size_is_refused(a: npt.NDArray[np.float32]) -> None:
    with pytest.raises(ConfigError, match="has 11999 elements, the payloads at least 12000"):
        describe(file_of(a), a[:-1])
    with pytest.raises(ConfigError, match="has 12001 elements, the payloads 12000"):
        describe(file_of(a), np.append(a, np.float32(0)))


def test_a_damaged_file_is_refused_with_a_reason(a: npt.NDArray[np.float32]) -> None:
    with pytest.raises(PayloadError, match="truncated"):
        describe(file_of(a)[:-1])


def test_nothing_is_described_as_nothing() -> None:
    assert describe(b"")["payloads"] == []
    assert describe(codec.encode(np.zeros(0, np.float32)).payload)["num_values"] == 0
    assert lines(describe(codec.encode(np.zeros(0, np.float32)).payload))


def test_the_command_reads_files_and_standard_input(
    a: npt.NDArray[np.float32], tmp_path: Path
) -> None:
    path, original, raw = tmp_path / "shard", tmp_path / "a.npy", tmp_path / "a.bin"
    path.write_bytes(file_of(a))
    np.save(original, a)
    raw.write_bytes(a.tobytes())
    run = CliRunner().invoke
    text = run(app, [str(path), "--original", str(original)])
    assert text.exit_code == 0
    assert "payload 2 at" in text.output
    assert "relative_error_of_sent" in text.output
    found = json.loads(run(app, [str(path), "--json", "--original", str(raw)]).output)
    assert found["bytes"] == len(file_of(a))
    piped = json.loads(run(app, ["-", "--json"], input=file_of(a)).output)
    assert piped["num_values"] == found["num_values"]


def test_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        inspect(str(tmp_path / "none"))
    (tmp_path / "odd").write_bytes(b"12345")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(ConfigError, match="5 bytes: fp32 numbers have 4 each"):
        inspect("-", original=tmp_path / "odd")
    np.save(tmp_path / "wide.npy", np.zeros(3))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(ConfigError, match="holds float64"):
        inspect("-", original=tmp_path / "wide.npy")
