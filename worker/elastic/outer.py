"""The outer state of a site whose ranks may die: every rank keeps all of it.

theta and error feedback (EF) of all rows lie on every rank, 8 bytes a parameter of host memory
instead of 8 / N. In return nothing of them moves when members change: all ranks apply the same
update to the same theta, and encode the same contribution from the same replica, so that EF is
recomputed, bit for bit, and not sent. A copy on the next rank would cost 4 bytes a parameter and
round on the wire for EF alone. And every rank has all shards of a contribution, so that those who
are left upload what a dead rank could not.
"""

from __future__ import annotations

from torch import nn

from loco.config import Config
from loco.inner.groups import Group
from loco.layout import Layout
from worker.exchange import Exchange, Made, Sent, Staged
from worker.site import Site


class ReplicatedExchange(Exchange):
    """theta and EF of all rows, on every rank; no method needs another rank."""

    def __init__(self, config: Config, site: Site, model: nn.Module, layout: Layout) -> None:
        super().__init__(config, Site(site.device, Group(alone=True)), model, layout)
        self._members = site

    def encode(
        self,
        k: int,
        *,
        own_step: float = 0.0,
        made: Made | None = None,  # noqa: ARG002
    ) -> Staged:
        """All shards of the contribution; EF stays as it is until they are kept.

        None is given to `made`: before they are kept, members may change, and who uploads which.
        """
        self._check_finite()
        # An encoding that members' change leaves behind must not write into what a rank that was
        # healed meanwhile has taken over.
        error_feedback, guess = self._ef.copy(), self._guess
        shards, parts = {}, []
        for shard in range(self._members.num_shards):
            rows = self._layout.shard(shard, self._members.num_shards)
            encoded = self._encode_rows(rows, error_feedback, k)
            shards[shard] = b"".join(part.payload for _, part in encoded)
            parts += encoded
        norm_sq = sum(part.norm_sq for _, part in parts) / self._members.num_ranks
        if own_step:
            self._fill(guess, error_feedback, parts, own_step)

        def keep() -> None:
            self._ef = error_feedback
            self._sent = Sent(self.round, parts)

        return Staged(shards=shards, ef_norm_sq=norm_sq, keep=keep)
