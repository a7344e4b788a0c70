"""The ranks of one site: who am I, and how outer state moves between us.

Tensors move by torch.distributed (NCCL on CUDA, gloo on CPU). On failure of a rank a collective
raises on the others; an error that is not a failure is raised by all ranks alike (`together`), so
that none waits for ever in a collective that another rank never enters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from loco import errors
from loco.errors import ConfigError, LocoError, RefusedError
from loco.inner.base import InnerOptimizer
from loco.inner.groups import Group
from loco.layout import CHUNK, Layout
from loco.wire.v1 import coordinator_pb2 as pb
from worker.environment import number_from

T = TypeVar("T")

SHORTEST_WAIT = timedelta(hours=2)
LONGEST_WAIT = timedelta(days=365)
MARGIN_SECONDS = 600.0  # for what a rank does after it gave the coordinator up, and all are told


def longest_collective(patience_seconds: float) -> timedelta:
    """The others wait in a collective while a rank waits for the coordinator: so long, and more."""
    seconds = min(patience_seconds + MARGIN_SECONDS, LONGEST_WAIT.total_seconds())
    return max(SHORTEST_WAIT, timedelta(seconds=seconds))


class MembersChanged(Exception):  # noqa: N818  # not an error: the site meets, and goes on
    """The members of the site are others now; what was staged and not committed is void."""


class Site:
    """This rank's view of its site, whose members stay the same until it ends.

    `worker.elastic` has the other kind, whose members are asked anew for every step: it raises
    MembersChanged from any collective, and the worker then calls `meet`. Every change of state that
    all ranks make alike goes through `commit_step` or `transition`.
    """

    def __init__(self, device: torch.device, group: Group) -> None:
        self.device = device
        self.group = group
        self.rank = group.rank
        self.num_ranks = group.size
        self.shards_a_rank = 1
        """In how many parts a rank uploads what it contributes."""

    @classmethod
    def join(cls, device_name: str, patience_seconds: float = 0.0) -> Site:
        """Form the site from torchrun's environment (RANK, WORLD_SIZE, ...), or a world of one.

        Args:
            patience_seconds: how long one rank may wait for the coordinator, >= 0.
        """
        device = pick_device(device_name)
        world = number_from("WORLD_SIZE", 1)
        if world > 1:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=os.environ.get("LOCO_INIT_METHOD", "env://"),
                rank=number_from("RANK"),
                world_size=world,
                timeout=longest_collective(patience_seconds),
            )
        return cls(device, Group())

    @property
    def num_shards(self) -> int:
        """Parts of the site's contributions: one or more for each rank that it joined with."""
        return self.num_ranks * self.shards_a_rank

    @property
    def leads(self) -> bool:
        """The rank that speaks for the site."""
        return self.rank == 0

    def meet(self, replica: Any) -> None:
        """Agree with those who are there on members and state."""

    @property
    def has_state(self) -> bool:
        """Whether the site has something to go on from; a static one never comes back to this."""
        return False

    def membership(self) -> pb.Membership:
        """What became of the members so far; nothing in a static group."""
        return pb.Membership()

    def begin(self) -> None:
        """A step begins, or a turn of waiting for the network, with the members of the last one."""

    def commit_step(
        self, optimizer: InnerOptimizer, staged: Any, count: Callable[[], None]
    ) -> None:
        """Apply an inner step that all ranks have staged, then `count` it."""
        optimizer.commit(staged)
        count()

    def transition(self, apply: Callable[[], None]) -> None:
        """Apply another change that all ranks have prepared."""
        apply()

    def fetch(self, span: range, fetch: Callable[[range], memoryview]) -> bytes | memoryview:
        """The bytes of `span` that this rank needs, by `fetch`."""
        return self.together(lambda: fetch(span))

    def speaks_last(self) -> bool:
        """Whether this rank, interrupted, says goodbye for the whole site."""
        return self.leads

    def close(self) -> None:
        """Leave the other ranks."""
        self.group.drop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; if it fails on any, all raise the lowest rank's error."""
        result, failure = None, b""
        try:
            result = work()
        except LocoError as error:
            failure = _pack_error(error)
        for packed in self.gather_bytes(failure):
            if packed:
                raise _unpack_error(packed)
        return result  # type: ignore[return-value]  # None only where work returned it

    def from_leader(self, work: Callable[[], bytes]) -> bytes:
        """Do `work` on the leader only; everyone gets what it returns, or raises what it raised."""
        mine = self.together(work if self.leads else bytes)
        return self.gather_bytes(mine)[0]

    def gather_whole(self, part: bytes | memoryview) -> bytes | memoryview:
        """Every rank's part, one behind the other; that of a rank alone is not copied."""
        return part if self.group.size == 1 else b"".join(self.gather_bytes(part))

    def gather_bytes(self, data: bytes | memoryview) -> list[bytes]:
        """What every rank gave, in order of rank; lengths may differ."""
        if self.group.size == 1:
            return [bytes(data)]
        lengths = self._gather(torch.tensor([len(data)], dtype=torch.int64)).view(-1)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if not len(padded):
            return [b""] * self.num_ranks
        rows = self._gather(padded)
        return [bytes(row[:n].numpy()) for row, n in zip(rows, lengths.tolist(), strict=True)]

    def gather_rows(self, own: Tensor, layout: Layout) -> Tensor:
        """From every rank's shard [rows * 4096] the whole padded buffer [num_elements], on CPU."""
        shards = [layout.shard(rank, self.num_ranks) for rank in range(self.num_ranks)]
        width = max(len(rows) for rows in shards) * CHUNK
        padded = torch.zeros(width, dtype=own.dtype)
        padded[: own.numel()] = own
        parts = self._gather(padded)
        return torch.cat(
            [part[: len(rows) * CHUNK] for part, rows in zip(parts, shards, strict=True)]
        )

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the ranks."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.group.all_reduce_sum(total)
        return total.tolist()

    def _gather(self, own: Tensor) -> Tensor:
        return self.group.all_gather(own.to(self.device)).wait().cpu()


def pick_device(name: str) -> torch.device:
    """The device of this rank; ConfigError for one that is not there."""
    local_rank = number_from("LOCAL_RANK", 0)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ConfigError(f"--device {name!r} is not known: use auto, cpu or cuda")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"--device cuda: rank {local_rank} of this node has no GPU, "
            f"{torch.cuda.device_count()} are visible; start fewer ranks or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _pack_error(error: LocoError) -> bytes:
    reason = error.reason if isinstance(error, RefusedError) else ""
    return json.dumps([type(error).__name__, str(error), reason]).encode()


def _unpack_error(packed: bytes) -> LocoError:
    name, message, reason = json.loads(packed)
    if name == "RefusedError":
        return RefusedError(message, reason=reason)
    kind = getattr(errors, name)
    assert issubclass(kind, LocoError)
    return kind(message) if name != "PayloadError" else LocoError(message)
