"""The outer state of one rank, and what it sends and applies.

theta and error feedback (EF) of the rank's rows lie in host memory as fp32. Per round (SparseLoCo,
arXiv 2508.15706): delta = theta - params; a = beta * EF + delta; v = Q(TopK(a)); EF = a - v once
the coordinator says that v is included, else EF = a.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

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

    theta: torch.Tensor
    error_feedback: torch.Tensor
    params: torch.Tensor
    """The replica: theta, and the inner steps made since the exchange."""


@dataclass(frozen=True)
class _Sent:
    """A contribution whose fate is open."""

    round: int
    parts: list[tuple[slice, codec.FeedbackEncoded]]  # by elements of the shard


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
        self._sent: _Sent | None = None
        self._anchor = self._theta  # params at the last encode, or theta as written after it
        self.round = 0
        self.ef_norm_sq = 0.0
        """Sum of squares of EF = a - v on this rank's rows, as `encode` left it."""

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

    def state(self) -> OuterState:
        """The state between two rounds; theta and EF are shared, not copied."""
        assert self._sent is None
        return OuterState(
            theta=torch.from_numpy(self._theta),
            error_feedback=torch.from_numpy(self._ef),
            params=torch.from_numpy(self._read_rows()),
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

    def capture(self) -> None:
        """Copy this rank's rows of the replica: where the pseudo-gradient is measured.

        Inner steps may go on as soon as it returns.

        Raises:
            NonFiniteError: names the tensor; nothing has changed.
        """
        params = self._read_rows()
        self._check_finite(params)
        self._anchor = params

    def encode(self, k: int) -> bytes:
        """This rank's shard of the contribution that `capture` began: one payload a cell."""
        params = self._anchor
        parts = []
        for cell in cells(self.rows):
            here = self._slice(cell)
            encoded = codec.encode_feedback(
                self._theta[here],
                params[here],
                self._ef[here],
                beta=self._config.outer.beta,
                k=k,
                bits=self._config.codec.bits,
            )
            parts.append((here, encoded))
        self._sent = _Sent(self.round, parts)
        self.ef_norm_sq = sum(encoded.norm_sq for _, encoded in parts)
        return b"".join(encoded.payload for _, encoded in parts)

    def settle(self, *, included: bool) -> None:
        """The coordinator has decided: keep EF = a - v, or take v back."""
        if self._sent is not None and not included:
            for here, encoded in self._sent.parts:
                encoded.undo(self._ef[here])
        self._sent = None

    def retract(self, limit: float) -> int:
        """The coordinator refused what was sent for its content: EF takes it back.

        Except for values that are larger than `limit` in magnitude or not finite: they would be
        refused in every round to come. Returns how many of them this rank's rows had.
        """
        self.settle(included=False)
        dropped = 0
        for cell in cells(self.rows):
            ef = self._ef[self._slice(cell)]
            absurd = ~(np.abs(ef) <= limit)
            ef[absurd] = 0
            dropped += int(np.count_nonzero(absurd))
        return dropped

    def apply(self, update: bytes) -> None:
        """theta of this round becomes theta of the next."""
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
        self.round += 1

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
