"""The parameters of one replica as a flat buffer, of which each rank of the site has its rows.

A buffer here is fp32 in host memory, [rows * 4096], padding included; the parameters may be on any
device. What is written, all ranks write alike.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from loco.layout import CHUNK, Layout
from worker.site import Site

Rows = npt.NDArray[np.float32]


class Parameters:
    """Reads and writes the trainable parameters of a model by rows of its layout."""

    def __init__(self, site: Site, model: nn.Module, layout: Layout, *, in_turns: bool) -> None:
        self._site = site
        self._layout = layout
        self._rows = layout.shard(site.rank, site.num_ranks)
        self._parameters = dict(model.named_parameters())
        self._in_turns = in_turns
        """Whether a round exchanges some chunks only."""

    def read(self, out: Rows) -> Rows:
        """This rank's rows, copied to `out`, whose padding is zero."""
        rows = torch.from_numpy(out)
        first, last = self._rows.start * CHUNK, self._rows.stop * CHUNK
        for p in self._layout.parameters:
            begin, end = max(p.start, first), min(p.start + p.numel, last)
            if begin < end:
                flat = self._parameters[p.name].detach().reshape(-1)
                rows[begin - first : end - first].copy_(flat[begin - p.start : end - p.start])
        return out

    @torch.no_grad()
    def write(self, rows: Rows) -> None:
        """Every rank's rows."""
        whole = torch.from_numpy(rows)
        if self._site.group.size > 1:
            whole = self._site.gather_rows(whole, self._layout)
        for parameter, here in self._whole_parameters():
            parameter.copy_(whole[here].view(parameter.shape))

    def move(self, anchor: Rows, target: Rows) -> None:
        """params <- target + (params - anchor).

        Where rounds exchange chunks in turns, exactly params where target is anchor.
        """
        if self._site.group.size == 1:
            self._move_in_place(anchor, target)
            return
        params = self.read(np.zeros_like(target))
        moved = (params - anchor) + target
        if self._in_turns:
            moved = np.where(target == anchor, params, moved)
        self.write(moved)

    @torch.no_grad()
    def overwrite(self, rows: Rows, where: npt.NDArray[np.bool_]) -> None:
        """params <- rows there; the others stay."""
        if self._site.group.size > 1:
            self.write(np.where(where, rows, self.read(np.zeros_like(rows))))
            return
        for p, here in self._whole_parameters():
            shape = tuple(p.shape)
            values, there = rows[here].reshape(shape), where[here].reshape(shape)
            if p.device.type == "cpu":  # a third of the time of torch.where
                np.copyto(p.numpy(), values, where=there)
            else:
                mask, new = (torch.from_numpy(b).to(p.device) for b in (there, values))
                p.copy_(torch.where(mask, new, p))

    @torch.no_grad()
    def _move_in_place(self, anchor: Rows, target: Rows) -> None:
        """Where this rank holds all rows; fresh memory is one tensor's."""
        for p, here in self._whole_parameters():
            then, now = (
                torch.from_numpy(b[here]).view(p.shape).to(p.device) for b in (anchor, target)
            )
            if self._in_turns:
                p.copy_(torch.where(now == then, p, (p - then).add_(now)))
            else:
                p.sub_(then).add_(now)

    def _whole_parameters(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Each trainable parameter, and its elements of the padded buffer."""
        for p in self._layout.parameters:
            yield self._parameters[p.name], slice(p.start, p.start + p.numel)
