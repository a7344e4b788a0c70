"""The endless stream of training batches of one site, cut among its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loco.data.mixture import Weighted, assign, shares
from loco.data.order import permute
from loco.errors import ConfigError, DataError


class DataStream:
    """Batches as a pure function of the inner step, which is the whole state of the stream.

    The text is cut in windows of `seq_len` tokens. Sample `i` of the site is the window at position
    `i mod num_windows` of epoch `i div num_windows`, each epoch in an order of its own: within an
    epoch no window comes twice and none is lost. Inner step `t` takes samples `t * batch` to
    `(t + 1) * batch - 1`, and rank r of N the rows `r * batch / N` to `(r + 1) * batch / N - 1`,
    so the site sees the same samples with any number of ranks. Where several corpora are mixed, the
    same holds for the samples of each, which `loco.data.mixture` picks.
    """

    def __init__(
        self,
        parts: Sequence[Weighted],
        *,
        seq_len: int,
        batch: int,
        seed: int,
        site: str,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """ConfigError if `world` does not divide `batch`, DataError if a part holds no window."""
        if batch % world:
            raise ConfigError(
                f"data.batch = {batch} cannot be split among {world} ranks: "
                "choose a number of ranks that divides it"
            )
        self.batch_size = batch
        self.split(rank, world)
        for part in parts:
            if len(part.tokens) <= seq_len:
                raise DataError(
                    f"the corpus of site {site!r} has {len(part.tokens)} tokens, too few for one "
                    f"sequence: model.seq_len = {seq_len} needs {seq_len + 1}; give more text or a "
                    "shorter one"
                )
        self._tokens = [part.tokens for part in parts]
        self._shares = shares([part.weight for part in parts])
        self.seq_len = seq_len
        self.seed = seed
        self.site = site
        self.num_windows = [(len(tokens) - 1) // seq_len for tokens in self._tokens]
        """Windows of an epoch of each part; the tokens after the last full one are left out."""

    def split(self, rank: int, world: int) -> None:
        """Give this rank its rows of every batch from now on: equally many, or one more or less.

        Raises:
            ConfigError: there are more ranks than rows.
        """
        if world > self.batch_size:
            raise ConfigError(
                f"data.batch = {self.batch_size} has no row for each of {world} ranks: "
                "choose a larger batch or fewer ranks"
            )
        self.first_row = rank * self.batch_size // world
        self.rows = (rank + 1) * self.batch_size // world - self.first_row

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank at inner step `step`: [rows, seq_len] int64.

        The targets are the inputs one token later.
        """
        first = step * self.batch_size + self.first_row
        samples = np.arange(first, first + self.rows)
        owners, numbers = assign(samples, self._shares, seed=self.seed, site=self.site)
        spans_BS = torch.empty(self.rows, self.seq_len + 1, dtype=torch.int64)
        for part in np.unique(owners):
            rows = np.flatnonzero(owners == part)
            starts = self._windows(int(part), numbers[rows]) * self.seq_len
            spans = self._tokens[part][starts[:, None] + np.arange(self.seq_len + 1)]
            spans_BS[torch.from_numpy(rows)] = torch.from_numpy(spans.astype(np.int64))
        return spans_BS[:, :-1], spans_BS[:, 1:]

    def _windows(self, part: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        length = self.num_windows[part]
        epochs, positions = np.divmod(samples, length)
        windows = np.empty_like(samples)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            windows[rows] = permute(
                positions[rows], length, seed=self.seed, site=self.site, epoch=int(epoch)
            )
        return windows
