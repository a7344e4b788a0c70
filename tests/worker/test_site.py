"""The ranks of a site, as real gloo processes: what one knows all know, and errors are shared.

Compared with: the same work done by one rank. Run alone: pytest tests/worker/test_site.py
"""

from __future__ import annotations

import math
import os
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.contributing import contribute
from support.ranks import spawn_ranks
from support.runs import config_of
from torch import nn

from loco import codec
from loco.errors import ConfigError, DataError, LocoError, NonFiniteError, RefusedError
from loco.inner.groups import Group
from loco.layout import CHUNK
from loco.model import layout_of, pack
from worker.exchange import Exchange
from worker.site import Site, longest_collective

RANKS = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(61, 77, generator=generator))
        self.b = nn.Parameter(torch.randn(9001, generator=generator))


def exchange_a_round(site: Site, update: bytes | None) -> tuple[str, bytes, bytes]:
    """Digest of theta, what this rank sends, and the parameters after `update` (or its own)."""
    model = Model()
    layout = layout_of(model)
    exchange = Exchange(config_of(codec={"k": 16}), site, model, layout)
    span = exchange.snapshot_span
    exchange.load(pack(model, layout).tobytes()[span.start : span.stop], 0)
    exchange.write_parameters()
    digest = exchange.digest()
    with torch.no_grad():
        model.a -= 0.25
    body = contribute(exchange, 16)
    exchange.settle(included=True)
    exchange.apply(exchange.stage(body if update is None else update))
    exchange.write_parameters()
    return digest, body, pack(model, layout).tobytes()


@pytest.mark.parametrize("patience", [0.0, 3600.0, 7200.0, 14400.0, math.inf])
def test_the_others_wait_longer_than_a_rank_for_the_coordinator(patience: float) -> None:
    """Or they would blame that rank, and the coordinator's absence would be nobody's."""
    assert longest_collective(patience) >= timedelta(seconds=min(patience, 3e7), minutes=10)


def check(rank: int, folder: str) -> None:
    """Everything that a rank checks; an assertion that fails here fails the test."""
    torch.set_num_threads(1)
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCO_INIT_METHOD": f"file://{folder}/rendezvous",
    }
    with mock.patch.dict(os.environ, environment):
        site = Site.join("cpu", patience_seconds=4 * 3600.0)
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == longest_collective(4 * 3600.0) > timedelta(hours=4)
    assert (site.rank, site.num_ranks, site.leads) == (rank, RANKS, rank == 0)
    assert site.gather_bytes(b"x" * rank) == [b"", b"x", b"xx"]
    assert site.gather_bytes(b"") == [b""] * RANKS
    assert site.sum(rank, 0.5) == [3.0, 1.5]
    assert site.from_leader(lambda: b"told by %d" % rank) == b"told by 0"
    assert site.together(lambda: rank * 10) == rank * 10
    _check_errors(site)
    _check_nan_of_one_rank(site)
    digest, body, parameters = exchange_a_round(site, Path(folder, "update").read_bytes())
    Path(folder, f"theta{rank}").write_bytes(digest.encode() + parameters)
    Path(folder, f"body{rank}").write_bytes(body)
    site.close()


def _check_errors(site: Site) -> None:
    """All ranks raise what the lowest failing rank raised, of its kind and with its words."""
    kinds: list[LocoError] = [
        ConfigError("no"),
        DataError("corpus"),
        NonFiniteError("NaN in b"),
        RefusedError("superseded by 2", reason="superseded"),
    ]
    for error in kinds:

        def fail(error: LocoError = error) -> None:
            if site.rank >= 1:
                raise type(error)(f"{error} {site.rank}", **_reason(error))

        with pytest.raises(type(error)) as caught:
            site.together(fail)
        assert type(caught.value) is type(error)
        assert str(caught.value) == f"{error} 1"
        assert caught.value.exit_code == error.exit_code
        assert getattr(caught.value, "reason", "") == getattr(error, "reason", "")

    def leader_fails() -> bytes:
        raise RefusedError("gone", reason="unknown_site")

    with pytest.raises(RefusedError, match="gone"):
        site.from_leader(leader_fails)


def _check_nan_of_one_rank(site: Site) -> None:
    """NaN in rows of the last rank only: all ranks raise its error, and none waits for it."""
    model = Model()
    layout = layout_of(model)
    exchange = Exchange(config_of(codec={"k": 16}), site, model, layout)
    with torch.no_grad():
        model.b[-1] = float("nan")
    exchange.capture(exchange.read())
    with pytest.raises(NonFiniteError, match="parameter b holds nan"):
        site.together(lambda: exchange.encode(16))


def _reason(error: LocoError) -> dict[str, str]:
    return {"reason": error.reason} if isinstance(error, RefusedError) else {}


@pytest.mark.slow
def test_ranks_agree_and_equal_one_rank(tmp_path: Path) -> None:
    digest, body, parameters = exchange_a_round(Site(torch.device("cpu"), Group()), None)
    (tmp_path / "update").write_bytes(body)
    spawn_ranks(check, (str(tmp_path),), RANKS)
    layout = layout_of(Model())
    whole = codec.decode(body, layout.num_elements).dense()
    for rank in range(RANKS):
        assert (tmp_path / f"theta{rank}").read_bytes() == digest.encode() + parameters
        rows = layout.shard(rank, RANKS)
        shard = codec.decode((tmp_path / f"body{rank}").read_bytes(), len(rows) * CHUNK)
        assert torch.equal(shard.dense(), whole[rows.start * CHUNK : rows.stop * CHUNK])


def test_one_rank_is_a_site_without_any_process_group() -> None:
    with mock.patch.dict(os.environ, clear=False):
        os.environ.pop("WORLD_SIZE", None)
        site = Site.join("cpu")
    assert (site.rank, site.num_ranks, site.leads) == (0, 1, True)
    assert site.gather_bytes(b"abc") == [b"abc"]
    assert site.sum(2.0, 3.0) == [2.0, 3.0]
    with pytest.raises(NonFiniteError, match="x"):
        site.together(lambda: _raise(NonFiniteError("x")))


def leave(rank: int, folder: str) -> None:
    """Close the site while something still holds its group, as an optimizer does until the end."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCO_INIT_METHOD=f"file://{folder}/meet")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    site = Site.join("cpu")
    held = site.group
    held.all_reduce_sum(torch.ones(3))
    assert _threads_of_gloo()
    site.close()
    assert not _threads_of_gloo(), held


def _threads_of_gloo() -> list[str]:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def test_a_closed_site_leaves_no_thread_that_could_abort_the_exit(tmp_path: Path) -> None:
    spawn_ranks(leave, (str(tmp_path),), 2)


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("name", ["tpu", "CPU", ""])
def test_an_unknown_device_names_those_that_exist(name: str) -> None:
    with pytest.raises(ConfigError, match="use auto, cpu or cuda"):
        Site.join(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="use --device cpu"):
        Site.join("cuda")


def test_bytes_survive_whatever_they_are() -> None:
    data = np.random.default_rng(0).bytes(100_003)
    assert Site.join("cpu").gather_bytes(data) == [data]
