"""The outer state of one rank, and what it sends and applies.

theta and error feedback (EF) of the rank's rows lie in host memory as fp32. Per round (SparseLoCo,
arXiv 2508.15706): delta = theta - params; a = beta * EF + delta; v = Q(TopK(a)); EF = a - v once
the coordinator says that v is included, else EF = a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from loco import codec
from loco.config import Config
from loco.digest import chunk_hashes, theta_digest
from loco.errors import NonFiniteError
from loco.layout import CHUNK, Layout, cells
from loco.outer import apply_update
from worker.site import Site


@dataclass(frozen=True, kw_only=True)
class OuterState:
    """What a checkpoint holds of one rank's rows, each [rows * 4096] fp32."""

    theta: Tensor
    error_feedback: Tensor
    params: Tensor
    """The replica: theta, and the inner steps made since the exchange."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A contribution that is encoded."""

    shards: dict[int, bytes]
    """Those shards that this rank can upload."""
    ef_norm_sq: float
    """Sum of squares of EF = a - v on this rank's rows."""
    keep: Callable[[], None]
    """Makes EF = a - v final, until the coordinator decides."""


class Undoable(Protocol):
    """A part of a contribution whose fate is open."""

    @property
    def indices(self) -> npt.NDArray[Any]:
        """Elements sent."""

    @property
    def originals(self) -> npt.NDArray[np.float32]:
        """a at these elements."""

    def undo(self, ef: npt.NDArray[np.float32]) -> None:
        """Turn EF = a - v back into a."""


class TakenBack:
    """An open contribution of another rank: all that is needed is how to take it back."""

    def __init__(self, indices: npt.NDArray[np.int64], originals: npt.NDArray[np.float32]) -> None:
        self.indices = indices
        self.originals = originals

    def undo(self, ef: npt.NDArray[np.float32]) -> None:
        """EF = a - v becomes a."""
        ef[self.indices] = self.originals


@dataclass(frozen=True)
class Sent:
    """A contribution whose fate is open."""

    round: int
    parts: Sequence[tuple[slice, Undoable]]  # by elements of the shard


class Exchange:
    """Holds theta and EF of this rank's rows; writes theta into the site's replicas."""

    def __init__(self, config: Config, site: Site, model: nn.Module, layout: Layout) -> None:
        self._config = config
        self._site = site
        self._layout = layout
        self._parameters = dict(model.named_parameters())
        self.rows = layout.shard(site.rank, site.num_ranks)
        self._theta = np.zeros(len(self.rows) * CHUNK, np.float32)
        self._ef = np.zeros_like(self._theta)
        self._sent: Sent | None = None
        self._anchor = self._theta  # params at the last encode, or theta as written after it
        self.round = 0
        self.num_dropped = 0
        """Values of all rows that the last `retract` could not take back."""

    @property
    def snapshot_span(self) -> range:
        """Bytes of a snapshot that hold this rank's rows."""
        return range(self.rows.start * CHUNK * 4, self.rows.stop * CHUNK * 4)

    def load(self, data: bytes, round_: int) -> None:
        """Take theta of this rank's rows from a snapshot; what EF held belongs to another theta."""
        self._theta[:] = np.frombuffer(data, "<f4")
        self._ef[:] = 0
        self._sent = None
        self.round = round_

    def state(self, rows: range) -> OuterState:
        """The state of some of this rank's rows between two rounds; theta and EF are shared."""
        assert self._sent is None
        here = self._slice(rows)
        return OuterState(
            theta=torch.from_numpy(self._theta[here]),
            error_feedback=torch.from_numpy(self._ef[here]),
            params=torch.from_numpy(self._read_rows()[here]),
        )

    def restore(self, state: OuterState, round_: int) -> None:
        """Take what `state` gave at that round, and write the replica."""
        self._theta[:] = state.theta.numpy()
        self._ef[:] = state.error_feedback.numpy()
        self._sent = None
        self._anchor = self._theta.copy()
        self._write_rows(state.params.numpy())
        self.round = round_

    def digest(self) -> str:
        """Digest of the whole theta; every rank hashes its own rows."""
        hashes = b"".join(self._site.gather_bytes(chunk_hashes(self._theta).tobytes()))
        return theta_digest(np.frombuffer(hashes, np.uint64))

    def write_parameters(self, *, keep_progress: bool = False) -> None:
        """Overwrite the replica with theta, equally on all ranks.

        `keep_progress`: with theta + (params - params at the last encode), so that inner steps made
        since then are not lost, however many updates come first; they are in the next
        pseudo-gradient.
        """
        rows = self._theta
        if keep_progress:
            rows = rows + (self._read_rows() - self._anchor)
        self._anchor = self._theta.copy()
        self._write_rows(rows)

    @contextmanager
    def theta_in_model(self) -> Iterator[None]:
        """Within it the replica holds theta without this site's progress since."""
        params = self._read_rows()
        self._write_rows(self._theta)
        try:
            yield
        finally:
            self._write_rows(params)

    def read(self) -> npt.NDArray[np.float32]:
        """A copy of this rank's rows of the replica, [rows * 4096].

        Raises:
            NonFiniteError: names the tensor.
        """
        params = self._read_rows()
        self._check_finite(params)
        return params

    def capture(self, params: npt.NDArray[np.float32]) -> None:
        """The pseudo-gradient is measured at what `read` gave; inner steps may go on."""
        self._anchor = params

    def encode(self, k: int) -> Staged:
        """This rank's shard of the contribution that `capture` began: one payload a cell."""
        parts = self._encode_rows(self.rows, self._ef, k)
        body = b"".join(encoded.payload for _, encoded in parts)
        norm_sq = sum(encoded.norm_sq for _, encoded in parts)

        def keep() -> None:
            self._sent = Sent(self.round, parts)

        return Staged(shards={self._site.rank: body}, ef_norm_sq=norm_sq, keep=keep)

    def _encode_rows(
        self, rows: range, error_feedback: npt.NDArray[np.float32], k: int
    ) -> list[tuple[slice, codec.FeedbackEncoded]]:
        """Each cell of some rows, and where it lies; `error_feedback` [all rows] becomes a - v."""
        parts = []
        for cell in cells(rows):
            here = self._slice(cell)
            encoded = codec.encode_feedback(
                self._theta[here],
                self._anchor[here],
                error_feedback[here],
                beta=self._config.outer.beta,
                k=k,
                bits=self._config.codec.bits,
            )
            parts.append((here, encoded))
        return parts

    def settle(self, *, included: bool) -> None:
        """The coordinator has decided: keep EF = a - v, or take v back."""
        if self._sent is not None and not included:
            for here, encoded in self._sent.parts:
                encoded.undo(self._ef[here])
        self._sent = None

    def retract(self, limit: float) -> None:
        """The coordinator refused what was sent for its content: EF takes it back.

        Except for values that are larger than `limit` in magnitude or not finite: they would be
        refused in every round to come.
        """
        self.settle(included=False)
        dropped = 0
        for cell in cells(self.rows):
            ef = self._ef[self._slice(cell)]
            absurd = ~(np.abs(ef) <= limit)
            ef[absurd] = 0
            dropped += int(np.count_nonzero(absurd))
        (total,) = self._site.sum(dropped)
        self.num_dropped = int(total)

    def apply(self, update: bytes) -> None:
        """theta of this round becomes theta of the next."""
        self._site.together(lambda: self._apply(update))
        self.round += 1

    def _apply(self, update: bytes) -> None:
        offset = 0
        for cell in cells(range(self._layout.num_chunks)):
            length = codec.payload_length(update[offset : offset + codec.HEADER_BYTES])
            payload = update[offset : offset + length]
            offset += length
            own = range(max(cell.start, self.rows.start), min(cell.stop, self.rows.stop))
            if own:
                apply_update(
                    self._theta[self._slice(own)],
                    payload,
                    cell_elements=len(cell) * CHUNK,
                    start=(own.start - cell.start) * CHUNK,
                )

    # --- for another rank that keeps the same rows ----------------------------------------------

    def give(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All of it, shared, as JSON and tensors."""
        tensors: dict[str, npt.NDArray[Any]] = {
            "theta": self._theta,
            "error_feedback": self._ef,
            "anchor": self._anchor,
        }
        if self._sent is not None:
            tensors["sent"], tensors["originals"] = self._sent_arrays()
        about = {"round": self.round, "sent_in": self._sent and self._sent.round}
        return about, {name: torch.from_numpy(array) for name, array in tensors.items()}

    def take(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Become what `give` gave on another rank."""
        self._theta[:] = tensors["theta"].numpy()
        self._ef[:] = tensors["error_feedback"].numpy()
        self._anchor = tensors["anchor"].numpy()
        self.round = about["round"]
        self._sent = None
        if about["sent_in"] is not None:
            whole = TakenBack(tensors["sent"].numpy(), tensors["originals"].numpy())
            self._sent = Sent(about["sent_in"], [(slice(0, len(self._theta)), whole)])

    def _sent_arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Elements that the open contribution holds, and EF there if it is taken back."""
        assert self._sent is not None
        places: list[npt.NDArray[Any]] = [
            part.indices + here.start for here, part in self._sent.parts
        ]
        originals = [part.originals for _, part in self._sent.parts]
        return np.concatenate(places).astype(np.int64), np.concatenate(originals)

    # --- rows of the replica --------------------------------------------------------------------

    def _slice(self, rows: range) -> slice:
        first = self.rows.start
        return slice((rows.start - first) * CHUNK, (rows.stop - first) * CHUNK)

    def _write_rows(self, rows: npt.NDArray[np.float32]) -> None:
        """Every rank's rows into the replica, equally on all ranks."""
        whole = self._site.gather_rows(torch.from_numpy(rows), self._layout)
        with torch.no_grad():
            for p in self._layout.parameters:
                flat = whole[p.start : p.start + p.numel]
                self._parameters[p.name].copy_(flat.view(p.shape))

    def _read_rows(self) -> npt.NDArray[np.float32]:
        """This rank's rows of the parameters, copied to the host tensor by tensor."""
        out = np.zeros_like(self._theta)
        first, last = self.rows.start * CHUNK, self.rows.stop * CHUNK
        for p in self._layout.parameters:
            begin, end = max(p.start, first), min(p.start + p.numel, last)
            if begin < end:
                flat = self._parameters[p.name].detach().reshape(-1)
                out[begin - first : end - first] = flat[begin - p.start : end - p.start].cpu()
        return out

    def _check_finite(self, params: npt.NDArray[np.float32]) -> None:
        finite = np.isfinite(params)
        if not finite.all():
            element = self.rows.start * CHUNK + int(np.argmin(finite))
            name = self._layout.parameter_at(element).name
            raise NonFiniteError(
                f"parameter {name} holds {params[np.argmin(finite)]} after round {self.round}; "
                "nothing of it was sent. Lower inner.lr and start again from the last round"
            )
