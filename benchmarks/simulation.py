"""Train several sites in one process: the equations and the code of a real run, without the wire.

Model, data, inner optimizer, codec and outer step are those that sites and coordinator use; what is
missing is transport, time and failure. A site is simulated as one rank (the number of ranks changes
neither its samples nor, up to rounding, its gradients). Sites take turns on one thread. Models and
batches may lie on a GPU; theta, EF and the codec's work lie in host memory, as in a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from loco import codec
from loco.config import Config
from loco.data import (
    DataStream,
    bits_per_byte,
    evaluate,
    load_parts,
    load_tokens,
    validation_windows,
)
from loco.inner.build import build_inner, lr_at
from loco.inner.groups import Group
from loco.layout import CHUNK, Layout, cells
from loco.model import build_model, layout_of, pack, unpack
from loco.outer import (
    GUESS_AFTER_STEPS,
    Fragments,
    OuterRules,
    Piece,
    alpha_at,
    k_at,
    k_of_site,
    num_turns,
    outer_step,
    own_step,
    rules_at,
)

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one outer round did; bytes are those of payloads, headers included."""

    round: int
    train_bpb: float
    """Mean over sites and inner steps."""
    bytes_up: int
    """Of one site, the mean over sites."""
    values_up: int
    """Values in those bytes."""
    bytes_down: int
    ef_norm: float
    """L2 norm of what a site has not sent yet, the mean over sites."""
    support_overlap: float
    """Share of the sent values whose position another site sent, too."""


@dataclass(frozen=True)
class Contribution:
    """What one site sends in a round: of each cell its elements of theta, and what is encoded."""

    parts: list[tuple[slice, codec.FeedbackEncoded]]

    @property
    def payload(self) -> bytes:
        """One payload a cell, in order."""
        return b"".join(part.payload for _, part in self.parts)

    @cached_property
    def indices(self) -> npt.NDArray[np.int64]:
        """Elements of theta.  # [num_values]"""
        return np.concatenate([part.indices + here.start for here, part in self.parts])

    @property
    def values(self) -> Array:
        """v at `indices`.  # [num_values]"""
        return np.concatenate([part.values for _, part in self.parts])


class SimulatedSite:
    """One site with one rank: its replica, its inner optimizer and its data.

    With several streams it takes a batch of each in every step: data-parallel training of as many
    sites, which average their gradients.
    """

    def __init__(self, config: Config, streams: list[DataStream], device: str = "cpu") -> None:
        self._config = config
        self._device = torch.device(device)
        self.model = build_model(config.model, seed=config.run.seed).to(self._device)
        self._inner = build_inner(config.inner, self.model, Group())
        self._streams = streams
        self._step = 0
        self._nats: list[float] = []

    def train(self, num_steps: int) -> None:
        """The next inner steps."""
        for step in range(self._step, self._step + num_steps):
            for group in self._inner.param_groups:
                group["lr"] = lr_at(self._config.inner, step, total_steps(self._config))
            self._inner.zero_grad()
            inputs, targets = (part.to(self._device) for part in self.batch(step))
            loss = self.model(inputs, targets)
            loss.backward()
            self._inner.step()
            self.note(loss.item())
        self._step += num_steps

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of an inner step, in host memory."""
        inputs, targets = zip(*(stream.batch(step) for stream in self._streams), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def note(self, nats: float) -> None:
        """Training loss of an inner step."""
        self._nats.append(nats)

    def exchanged(self) -> float:
        """Mean training loss in nats of the inner steps since the last call."""
        mean = sum(self._nats) / len(self._nats)
        self._nats.clear()
        return mean

    def evaluate(self, windows: torch.Tensor) -> float:
        """Bits per byte of the replica on windows [num, seq_len + 1] int64."""
        return bits_per_byte(*evaluate(self.model, windows.to(self._device)))

    def write(self, flat: Array, layout: Layout) -> None:
        """Overwrite the replica from a padded buffer."""
        with torch.no_grad():
            for name, value in unpack(flat, layout).items():
                self.model.get_parameter(name).copy_(torch.from_numpy(value))


class Simulation:
    """A whole run; `rounds()` trains, `evaluate()` measures the current theta.

    With `exact_downlink` the update is sent as whole numbers instead of a few bits each. With
    `data_parallel` the sites of the config share one replica and average gradients in every step,
    on the samples that each would have taken alone. `device` is where models train.
    """

    def __init__(
        self,
        config: Config,
        *,
        exact_downlink: bool = False,
        data_parallel: bool = False,
        device: str = "cpu",
    ) -> None:
        self._config = config
        self._exact_downlink = exact_downlink
        streams = streams_of(config)
        groups = [streams] if data_parallel else [[stream] for stream in streams]
        self._sites = [SimulatedSite(config, group, device) for group in groups]
        self.layout: Layout = layout_of(self._sites[0].model)
        self._cells = list(cells(range(self.layout.num_chunks)))
        self._fragments = Fragments(config.outer, self.layout)
        self._turns = num_turns(config.outer)
        self.theta: Array = pack(self._sites[0].model, self.layout)
        self._ef = [np.zeros_like(self.theta) for _ in self._sites]
        self._residual = np.zeros_like(self.theta)
        self._momentum = np.zeros_like(self.theta)
        self._held_out = self._windows(config.data.corpus)

    def rounds(self) -> Iterator[Round]:
        """Train round by round; after the last one the sites hold the final theta."""
        for due in self.life():
            if isinstance(due, Round):
                yield due
            else:
                self._train(due)

    def life(self) -> Iterator[int | Round]:
        """What happens, in order: so many inner steps are due at all sites, or a round is over."""
        ahead = 0  # inner steps of this round that were made while the last exchange went on
        for round_ in range(self._config.run.rounds):
            yield self._config.inner.steps - ahead
            nats = [site.exchanged() for site in self._sites]
            anchors = [self._anchor(index, round_) for index in range(len(self._sites))]
            sent = [self._encode(index, round_) for index in range(len(self._sites))]
            last = round_ + 1 == self._config.run.rounds
            ahead = 0 if last else self._config.outer.delay_steps
            step = self._own_step(round_) if ahead > GUESS_AFTER_STEPS else 0.0
            if step:
                yield GUESS_AFTER_STEPS
                anchors = [
                    self._anticipate(index, anchor, encoded, step)
                    for index, (anchor, encoded) in enumerate(zip(anchors, sent, strict=True))
                ]
            yield ahead - (GUESS_AFTER_STEPS if step else 0)
            update = self._outer_step(round_, [encoded.payload for encoded in sent])
            for index, anchor in enumerate(anchors):
                replica = start = self._start(index)
                if step:
                    params = pack(self._sites[index].model, self.layout)
                    replica = np.where(start == anchor, params, start)
                elif ahead or self._turns > 1:
                    replica = self._merged(index, anchor, start)
                self._sites[index].write(replica, self.layout)
            yield Round(
                round=round_,
                train_bpb=bits_per_byte(sum(nats), len(nats)),
                bytes_up=sum(len(encoded.payload) for encoded in sent) // len(sent),
                values_up=sum(len(encoded.indices) for encoded in sent) // len(sent),
                bytes_down=len(update),
                ef_norm=float(np.mean([np.linalg.norm(ef) for ef in self._ef])),
                support_overlap=support_overlap([encoded.indices for encoded in sent]),
            )

    def evaluate(self, corpus: str | None = None) -> float:
        """Bits per byte of theta on the run's held-out text, or on what is held out of `corpus`."""
        windows = self._held_out if corpus is None else self._windows(corpus)
        site = self._sites[0]
        replica = pack(site.model, self.layout)
        site.write(self.theta, self.layout)
        measured = site.evaluate(windows)
        site.write(replica, self.layout)
        return measured

    def _windows(self, corpus: str) -> torch.Tensor:
        """Held-out text of a corpus.  # [eval.sequences, seq_len + 1] int64"""
        return validation_windows(
            load_tokens(corpus, "validation"),
            seq_len=self._config.model.seq_len,
            count=self._config.eval.sequences,
        )

    @property
    def config(self) -> Config:
        """Of the run."""
        return self._config

    @property
    def sites(self) -> list[SimulatedSite]:
        """All of them, in the order of their names."""
        return self._sites

    def _train(self, num_steps: int) -> None:
        """Inner steps at all sites."""
        for site in self._sites:
            site.train(num_steps)

    def _active(self, round_: int) -> npt.NDArray[np.bool_]:
        """The chunks that the round exchanges.  # [num_chunks]"""
        return self._fragments.in_round(range(self.layout.num_chunks), round_)

    def _start(self, index: int) -> Array:
        """From where a replica goes on: theta, or theta - EF where it keeps what is unsent."""
        if self._config.outer.unsent == "feedback":
            return self.theta
        return self.theta - self._ef[index]

    def _anchor(self, index: int, round_: int) -> Array:
        """Parameters at the exchange; the replica's start where the round exchanges nothing."""
        active = np.repeat(self._active(round_), CHUNK)
        params = pack(self._sites[index].model, self.layout)
        return np.where(active, params, self._start(index))

    def _own_step(self, round_: int) -> float:
        rules = rules_at(self._config.outer, self._config.codec, round_)
        outer = self._config.outer
        return own_step(rules, alpha_at(outer, round_), outer.momentum, len(self._sites))

    def _anticipate(self, index: int, anchor: Array, sent: Contribution, step: float) -> Array:
        """The site goes on from its start less step * v, which is its anchor from then on.

        The steps since the exchange, made while it encoded, come on top.
        """
        guess = self._start(index).copy()
        guess[sent.indices] -= np.float32(step) * sent.values
        self._sites[index].write(self._merged(index, anchor, guess), self.layout)
        return guess

    def _merged(self, index: int, anchor: Array, target: Array) -> Array:
        """target + (params - anchor); exactly params where the round exchanged nothing."""
        params = pack(self._sites[index].model, self.layout)
        moved = (params - anchor) + target
        if self._turns == 1:
            return moved
        return np.where(target == anchor, params, moved)

    def _encode(self, index: int, round_: int) -> Contribution:
        params, active = pack(self._sites[index].model, self.layout), self._active(round_)
        return Contribution(
            [
                (
                    here,
                    self._encode_cell(
                        round_, here, params[here], self._ef[index][here], active[rows]
                    ),
                )
                for rows, here in self._slices()
            ]
        )

    def _encode_cell(
        self,
        round_: int,
        here: slice,
        params: Array,
        error_feedback: Array,
        active: npt.NDArray[np.bool_],
    ) -> codec.FeedbackEncoded:
        rules = rules_at(self._config.outer, self._config.codec, round_)
        return codec.encode_fragment(
            self.theta[here],
            params,
            error_feedback,
            active=active,
            beta=self._config.outer.beta,
            k=k_of_site(
                rules.k or k_at(self._config.codec, round_, self._config.run.rounds),
                self._config.codec.k_sites,
                len(self._sites),
            ),
            bits=rules.bits,
        )

    def _slices(self) -> Iterator[tuple[slice, slice]]:
        """Of each cell the rows and the elements."""
        for cell in self._cells:
            yield slice(cell.start, cell.stop), slice(cell.start * CHUNK, cell.stop * CHUNK)

    def _outer_step(self, round_: int, payloads: list[bytes]) -> bytes:
        """The update, one payload a cell, of the sites' contributions; theta follows it."""
        own = rules_at(self._config.outer, self._config.codec, round_)
        rules = OuterRules(
            aggregation=own.aggregation,
            alpha=alpha_at(self._config.outer, round_),
            momentum=self._config.outer.momentum,
            bits=32 if self._exact_downlink else own.bits,
        )
        weight = 1 / len(payloads)
        of_cells = zip(*map(split_payloads, payloads), strict=True)
        return b"".join(
            outer_step(
                rules,
                [
                    Piece(
                        start=0,
                        num_elements=here.stop - here.start,
                        weight=weight,
                        scale=1.0,
                        payload=payload,
                    )
                    for payload in of_sites
                ],
                theta=self.theta[here],
                residual=self._residual[here],
                momentum=self._momentum[here],
            )
            for (_, here), of_sites in zip(self._slices(), of_cells, strict=True)
        )


def split_payloads(contribution: bytes) -> list[bytes]:
    """The payloads that follow one another, one a cell."""
    found, at = [], 0
    while at < len(contribution):
        length = codec.payload_length(contribution[at : at + codec.HEADER_BYTES])
        found.append(contribution[at : at + length])
        at += length
    return found


def streams_of(config: Config) -> list[DataStream]:
    """The data of every site, sites in order of their names, as contributions are added."""
    corpora = config.data.sites or {"all": config.data.corpus}
    return [
        DataStream(
            load_parts(corpus, "train"),
            seq_len=config.model.seq_len,
            batch=config.data.batch,
            seed=config.run.seed,
            site=name,
        )
        for name, corpus in sorted(corpora.items())
    ]


def support_overlap(supports: list[npt.NDArray[np.int64]]) -> float:
    """Of all sent values, the share whose position at least two sites sent; 0 for one site.

    `supports` are the sent positions of each site, [num_values] int64, none twice.
    """
    sent = np.concatenate(supports)
    if not len(sent):
        return 0.0
    senders = np.bincount(sent)  # [largest position + 1]
    return float(np.mean(senders[sent] > 1))


def all_reduce_bytes(dense_bytes: int, sites: int) -> int:
    """Bytes that a member of a ring sends to average `dense_bytes`: reduce-scatter, all-gather."""
    return 2 * dense_bytes * (sites - 1) // sites


def total_steps(config: Config) -> int:
    """Inner steps of the whole run at one site."""
    return config.run.rounds * config.inner.steps
