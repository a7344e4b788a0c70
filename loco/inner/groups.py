"""Every collective of the inner optimizers, in one place, with the bytes counted.

The methods of `torch.distributed.ProcessGroup` are called directly, because the process group of a
torchft Manager offers the same ones. Its gloo wrapper refuses reduce-scatter and uneven
all-gather, and gloo's reduce-scatter sends as much as an all-reduce; so the sparse sync uses
all-to-all with a local sum, and all-gathers of equal sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from loco.errors import ConfigError


class Group:
    """The ranks of one site, or a world of one that never communicates.

    Args:
        process_group: the ranks; None is the default process group where torch.distributed runs,
            else a world of one.
        alone: a world of one, also where torch.distributed runs.
        rank: this rank, where `process_group.rank()` does not tell (0 on every rank in torchft).

    On failure of a rank the collectives raise what the backend raises (RuntimeError).
    `bytes_sent` counts what a rank sends: all-reduce as a ring, 2 (N-1)/N of the buffer, the others
    what leaves for other ranks.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        rank: int | None = None,
        alone: bool = False,
    ) -> None:
        if process_group is None and not alone and dist.is_available() and dist.is_initialized():
            process_group = dist.group.WORLD
        self._process_group = process_group
        self.size = 1 if process_group is None else process_group.size()
        if rank is None:
            rank = 0 if process_group is None else process_group.rank()
        self.rank = rank
        self.bytes_sent = 0

    @classmethod
    def of(cls, group: Group | dist.ProcessGroup | None) -> Group:
        """`group` itself if it is a Group already, else a new Group over it."""
        return group if isinstance(group, Group) else cls(group)

    def all_reduce_sum(self, buffer: Tensor) -> None:
        """Replace `buffer` by its sum over the ranks, bit-equal on all of them."""
        if self.size == 1:
            return
        self.bytes_sent += 2 * buffer.nbytes * (self.size - 1) // self.size
        self._run(lambda ranks: ranks.allreduce([buffer], dist.AllreduceOptions()))

    def all_gather(self, own: Tensor) -> Gathering:
        """Start gathering `own`, equally shaped on all ranks; the result is [size, *own.shape]."""
        gathered = own.new_empty((self.size, *own.shape))
        if self.size == 1 or own.numel() == 0:
            gathered[:] = own
            return Gathering(gathered, None)
        self.bytes_sent += own.nbytes * (self.size - 1)
        finish = self.start(
            lambda ranks: ranks.allgather_into_tensor_coalesced(
                [gathered.view(-1)], [own.view(-1)], AllgatherOptions()
            )
        )
        return Gathering(gathered, finish)

    def all_to_all(self, send: Tensor, send_sizes: list[int]) -> Tensor:
        """Send the r-th part of `send` [sum(send_sizes)] to rank r.

        Returns:
            What all ranks sent here, [size, send_sizes[rank]], ordered by sender.
        """
        own = send_sizes[self.rank]
        received = send.new_empty((self.size, own))
        if self.size == 1:
            received[0] = send
            return received
        self.bytes_sent += (send.numel() - own) * send.element_size()
        sizes = [own] * self.size
        self._run(
            lambda ranks: ranks.alltoall_base(
                received.view(-1), send, sizes, send_sizes, dist.AllToAllOptions()
            )
        )
        return received

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """Replace `buffer`, equally shaped on all ranks, by that of rank `source`."""
        if self.size == 1 or buffer.numel() == 0:
            return
        if self.rank == source:
            self.bytes_sent += buffer.nbytes * (self.size - 1)
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._run(lambda ranks: ranks.broadcast([buffer], options))

    def shift(self, own: Tensor, num_received: int) -> Tensor:
        """Send `own` [k] to the next rank, the last one's to the first.

        Returns:
            What the rank before sent, [num_received].
        """
        received = own.new_empty(num_received)
        if self.size == 1:
            received.copy_(own)
            return received
        self.bytes_sent += own.nbytes
        following, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sent = [own.numel() if rank == following else 0 for rank in range(self.size)]
        came = [num_received if rank == before else 0 for rank in range(self.size)]
        self._run(
            lambda ranks: ranks.alltoall_base(received, own, came, sent, dist.AllToAllOptions())
        )
        return received

    def start(self, collective: Callable[[dist.ProcessGroup], dist.Work]) -> Callable[[], None]:
        """Start a collective; what is returned blocks until it is done.

        Every collective goes through here: a group whose members may be lost overrides it.
        """
        assert self._process_group is not None
        work = collective(self._process_group)
        return lambda: _wait(work)

    def drop(self) -> threading.Thread | None:
        """Forget the process group, so that who destroys it also ends its threads.

        An optimizer may hold this object until the interpreter is torn down; a thread of gloo that
        then still has a tensor in its hands aborts the process. Returns the thread that is still at
        it, if any.
        """
        self._process_group = None
        return None

    def _run(self, collective: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        self.start(collective)()


class Gathering:
    """An all-gather in flight."""

    def __init__(self, gathered: Tensor, finish: Callable[[], None] | None) -> None:
        self._gathered = gathered
        self._finish = finish

    def wait(self) -> Tensor:
        """Block until every rank's part is here (on CUDA: until the stream may use it)."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._gathered


def _wait(work: dist.Work) -> None:
    work.wait()


def require_equal(group: Group, lines: list[str], device: torch.device) -> None:
    """Check that all ranks describe the same model.

    Args:
        lines: one description of each parameter, in order, without line breaks.
        device: where the backend wants its tensors.

    Raises:
        ConfigError: on every rank, naming the first line that differs.
    """
    own = torch.tensor(list("\n".join(lines).encode()), dtype=torch.uint8, device=device)
    lengths = group.all_gather(torch.tensor([own.numel()], device=device)).wait().view(-1)
    padded = own.new_zeros(int(lengths.max()))
    padded[: own.numel()] = own
    gathered = group.all_gather(padded).wait()
    texts = [
        bytes(row[:length].tolist()).decode().split("\n")
        for row, length in zip(gathered, lengths.tolist(), strict=True)
    ]
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        width = max(len(text), len(texts[0]))
        first, other = (t + ["nothing"] * (width - len(t)) for t in (texts[0], text))
        ours, theirs = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
        raise ConfigError(
            f"the ranks of this site train different models: rank 0 has {ours}, rank {rank} has "
            f"{theirs}; start all ranks with the same model and the same parameter groups"
        )
