"""The outer state of one rank, and what it sends and applies.

theta and error feedback (EF) of the rank's rows lie in host memory as fp32. Per round (SparseLoCo,
arXiv 2508.15706): delta = theta - params; a = beta * EF + delta; v = Q(TopK(a)); EF = a - v once
the coordinator says that v is included, else EF = a. The replica starts the next round from theta,
or with `outer.unsent = "replica"` from theta - EF.

`encode` and `stage` may run beside inner steps, in another thread: they touch no parameter. On the
thread that trains remain one copy of the parameters (`read`) and one pass over them
(`write_parameters`).
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
from loco.outer import Fragments, apply_update, num_turns, rules_at
from worker.lanes import num_shards
from worker.parameters import Parameters
from worker.site import Site

Made = Callable[[int, bytes], None]
"""Called with a shard's number and its payloads."""


def contribution_bytes(config: Config, layout: Layout) -> int:
    """About what a site sends in an ordinary round.

    Denser ones, at the begin or the end, come in as many parts: cut by them, all others would be
    crumbs, each with a call of its own.
    """
    codec_ = config.codec
    if codec_.bits == 32:
        return 4 * layout.num_elements
    return layout.num_chunks * codec_.k * (8 + codec_.bits) // 8  # positions take about 8 bits


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


@dataclass(frozen=True, kw_only=True)
class NextTheta:
    """theta of the next round, made and not yet in force."""

    theta: npt.NDArray[np.float32]
    """This rank's rows, [rows * 4096]."""
    hashes: npt.NDArray[np.uint64]
    """Of each row, [rows]."""


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
        self._fragments = Fragments(config.outer, layout)
        self._parameters = Parameters(site, model, layout, in_turns=num_turns(config.outer) > 1)
        self.rows = layout.shard(site.rank, site.num_ranks)
        of_a_rank = contribution_bytes(config, layout) // site.num_ranks
        site.shards_a_rank = num_shards(of_a_rank, site.num_ranks)
        self._theta = np.zeros(len(self.rows) * CHUNK, np.float32)
        self._hashes = chunk_hashes(self._theta)
        self._ef = np.zeros_like(self._theta)
        self._sent: Sent | None = None
        # params at the last capture, or what was written after it, without the site's progress. If
        # that is theta it is the same array: theta changes only by exchanging it for another one.
        self._anchor = self._theta
        # Where the next theta and the next params are made. Fresh memory would cost page faults.
        self._spare_theta = np.zeros_like(self._theta)
        self._spare_params = np.zeros_like(self._theta)
        # theta - EF as it was written last, and where it is made next; and where the next update is
        # expected to lead. Without zeros_like, which would take the memory before it is written.
        self._starts = [np.zeros(len(self._theta), np.float32) for _ in range(2)]
        self._guess = np.zeros(len(self._theta), np.float32)
        self.round = 0
        self.num_dropped = 0
        """Values of all rows that the last `retract` could not take back."""

    @property
    def snapshot_span(self) -> range:
        """Bytes of a snapshot that hold this rank's rows."""
        return range(self.rows.start * CHUNK * 4, self.rows.stop * CHUNK * 4)

    def load(self, data: bytes | memoryview, round_: int) -> None:
        """Take theta of this rank's rows from a snapshot; what EF held belongs to another theta."""
        self._set_theta(np.frombuffer(data, "<f4"))
        self.drop_unsent()
        self.round = round_

    def drop_unsent(self) -> None:
        """Empty EF; the replica is the caller's matter."""
        self._ef[:] = 0
        self._sent = None

    def state(self, rows: range) -> OuterState:
        """The state of some of this rank's rows between two rounds; theta and EF are shared."""
        assert self._sent is None
        here = self._slice(rows)
        return OuterState(
            theta=torch.from_numpy(self._theta[here]),
            error_feedback=torch.from_numpy(self._ef[here]),
            params=torch.from_numpy(self._parameters.read(np.zeros_like(self._theta))[here]),
        )

    def restore(self, state: OuterState, round_: int) -> None:
        """Take what `state` gave at that round, and write the replica."""
        self._set_theta(state.theta.numpy())
        self._ef[:] = state.error_feedback.numpy()
        self._sent = None
        self._anchor = self._start()
        self._parameters.write(state.params.numpy())
        self.round = round_

    def _set_theta(self, theta: npt.NDArray[np.float32]) -> None:
        self._theta[:] = theta
        self._hashes = chunk_hashes(self._theta)

    def digest(self) -> str:
        """Digest of the whole theta; every rank hashes its own rows."""
        hashes = b"".join(self._site.gather_bytes(self._hashes.tobytes()))
        return theta_digest(np.frombuffer(hashes, np.uint64))

    def write_parameters(self, *, keep_progress: bool = False) -> None:
        """Overwrite the replica with theta (or theta - EF), equally on all ranks.

        `keep_progress`: with theta + (params - params at the last encode), so that inner steps made
        since then are not lost, however many updates come first; they are in the next
        pseudo-gradient. After `anticipate` only theta's values are taken over where the update is
        another than was guessed: there others did what this site has been doing meanwhile, and both
        together would be too much (docs/results/overlap_*.md).
        """
        start = self._start()
        if keep_progress and self._anchor is self._guess:
            # In memory that the next update will overwrite: fresh memory costs more than the rest.
            other = self._spare_theta.view(np.bool_)[: len(start)]
            self._parameters.overwrite(start, np.not_equal(start, self._guess, out=other))
        elif keep_progress:
            self._parameters.move(self._anchor, start)
        else:
            self._parameters.write(start)
        self._anchor = start

    def anticipate(self) -> None:
        """The replica goes on from its start less own_step * v, with the steps since `capture`.

        After `keep`, of what `encode` was told an own_step for. That is where the update will lead
        as far as this site can know: what is missing are the values of others. Inner steps until it
        comes are then made where blocking would make them, and not at the end of the site's own
        path, of which theta takes few coordinates.
        """
        assert self._anchor is not self._guess, "anticipated already"
        self._parameters.move(self._anchor, self._guess)
        self._anchor = self._guess

    def _start(self) -> npt.NDArray[np.float32]:
        """From where the replica goes on: theta, or theta - EF where it keeps what is unsent."""
        if self._config.outer.unsent == "feedback":
            return self._theta
        self._starts.reverse()  # the anchor may still be the other one
        return np.subtract(self._theta, self._ef, out=self._starts[0])

    def _fill(
        self,
        guess: npt.NDArray[np.float32],
        error_feedback: npt.NDArray[np.float32],
        parts: Sequence[tuple[slice, codec.FeedbackEncoded]],
        own_step: float,
    ) -> None:
        """The guess of `anticipate`, from EF = a - v and v."""
        if self._config.outer.unsent == "feedback":
            np.copyto(guess, self._theta)
        else:
            np.subtract(self._theta, error_feedback, out=guess)
        for here, encoded in parts:
            guess[here][encoded.indices] -= np.float32(own_step) * encoded.values

    def write_theta(self) -> None:
        """Overwrite the replica with theta as the run has it, equally on all ranks."""
        self._parameters.write(self._theta)

    @contextmanager
    def theta_in_model(self) -> Iterator[None]:
        """Within it the replica holds theta without this site's progress since."""
        params = self._parameters.read(np.zeros_like(self._theta))
        self.write_theta()
        try:
            yield
        finally:
            self._parameters.write(params)

    def read(self) -> npt.NDArray[np.float32]:
        """A copy of this rank's rows of the replica, [rows * 4096], for `capture`."""
        if self._anchor is self._spare_params:  # captured, and not yet given back by an update
            return self._parameters.read(np.zeros_like(self._theta))
        return self._parameters.read(self._spare_params)

    def capture(self, params: npt.NDArray[np.float32]) -> None:
        """The pseudo-gradient is measured at what `read` gave; inner steps may go on.

        Chunks of another fragment than the round's keep their anchor: their progress goes on until
        their own exchange.
        """
        idle = ~self._fragments.in_round(self.rows, self.round)
        params.reshape(-1, CHUNK)[idle] = self._anchor.reshape(-1, CHUNK)[idle]
        self._anchor = params

    def encode(self, k: int, *, own_step: float = 0.0, made: Made | None = None) -> Staged:
        """This rank's shards of the contribution that `capture` began: one payload a cell.

        Each is given to `made` as soon as it is complete; the next ones are encoded meanwhile. With
        `own_step` it also makes the guess for `anticipate`.

        Raises:
            NonFiniteError: names the tensor; EF is as it was.
        """
        self._check_finite()
        shards, parts = {}, []
        each = self._site.shards_a_rank
        for shard in range(self._site.rank * each, (self._site.rank + 1) * each):
            rows = self._layout.shard(shard, self._site.num_shards)
            encoded = self._encode_rows(rows, self._ef, k)
            shards[shard] = b"".join(part.payload for _, part in encoded)
            if made is not None:
                made(shard, shards[shard])
            parts += encoded
        norm_sq = sum(encoded.norm_sq for _, encoded in parts)
        if own_step:
            self._fill(self._guess, self._ef, parts, own_step)

        def keep() -> None:
            self._sent = Sent(self.round, parts)

        return Staged(shards=shards, ef_norm_sq=norm_sq, keep=keep)

    def _encode_rows(
        self, rows: range, error_feedback: npt.NDArray[np.float32], k: int
    ) -> list[tuple[slice, codec.FeedbackEncoded]]:
        """Each cell of some rows, and where it lies; `error_feedback` [all rows] becomes a - v."""
        parts = []
        rules = rules_at(self._config.outer, self._config.codec, self.round)
        for cell in cells(rows):
            here = self._slice(cell)
            encoded = codec.encode_fragment(
                self._theta[here],
                self._anchor[here],
                error_feedback[here],
                active=self._fragments.in_round(cell, self.round),
                beta=self._config.outer.beta,
                k=k,
                bits=rules.bits,
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

    def stage(self, update: bytes | memoryview) -> NextTheta:
        """theta of the next round, which `apply` will put in force; valid until the next one.

        Raises:
            PayloadError: the update is malformed; nothing has changed.
        """
        assert self._anchor is not self._spare_theta, "applied, and not written"
        theta = self._spare_theta
        np.copyto(theta, self._theta)
        offset = 0
        for cell in cells(range(self._layout.num_chunks)):
            length = codec.payload_length(update[offset : offset + codec.HEADER_BYTES])
            payload = update[offset : offset + length]
            offset += length
            own = range(max(cell.start, self.rows.start), min(cell.stop, self.rows.stop))
            if own:
                apply_update(
                    theta[self._slice(own)],
                    payload,
                    cell_elements=len(cell) * CHUNK,
                    start=(own.start - cell.start) * CHUNK,
                )
        return NextTheta(theta=theta, hashes=chunk_hashes(theta))

    def apply(self, staged: NextTheta) -> None:
        """theta of this round becomes theta of the next; the replica stays as it is."""
        self._spare_theta, self._theta = self._theta, staged.theta
        self._hashes = staged.hashes
        self.round += 1

    # --- for another rank that keeps the same rows ----------------------------------------------

    def give(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All of it, shared, as JSON and tensors."""
        tensors = self.lasting()
        if self._sent is not None:
            places, originals = self._sent_arrays()
            tensors["sent"] = torch.from_numpy(places)
            tensors["originals"] = torch.from_numpy(originals)
        about = {
            "round": self.round,
            "sent_in": self._sent and self._sent.round,
            "anticipated": self._anchor is self._guess,
        }
        return about, tensors

    def lasting(self) -> dict[str, Tensor]:
        """Of `give`, what changes once a round at most; may be called by another thread."""
        named = {"theta": self._theta, "error_feedback": self._ef, "anchor": self._anchor}
        return {name: torch.from_numpy(array) for name, array in named.items()}

    def take(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Become what `give` gave on another rank."""
        self._set_theta(tensors["theta"].numpy())
        self._ef[:] = tensors["error_feedback"].numpy()
        self._anchor = tensors["anchor"].numpy()
        if about["anticipated"]:
            self._guess = self._anchor
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

    def _slice(self, rows: range) -> slice:
        first = self.rows.start
        return slice((rows.start - first) * CHUNK, (rows.stop - first) * CHUNK)

    def _check_finite(self) -> None:
        """NonFiniteError unless the captured params are finite."""
        finite = np.isfinite(self._anchor)
        if not finite.all():
            at = int(np.argmin(finite))
            name = self._layout.parameter_at(self.rows.start * CHUNK + at).name
            raise NonFiniteError(
                f"parameter {name} holds {self._anchor[at]} after round {self.round}; "
                "nothing of it was sent. Lower inner.lr and start again from the last round"
            )
