"""From the saved states of all ranks of a site to the state of one rank among another number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loco.errors import ConfigError
from loco.inner.shards import make_regions, make_shards


def reshard(states: Sequence[dict[str, Any]], *, rank: int, size: int) -> dict[str, Any]:
    """Fit the states that all ranks of a site saved at one step to rank `rank` of `size`.

    The owners' buffers are cut anew, masks stay. With another number of ranks every rank starts
    with the mean of the residuals, which is what the site as a whole had not sent yet.

    Args:
        states: what `state_dict` returned on every rank, in any order.

    Raises:
        ConfigError: a rank's state is missing, or they are not of one step of one run.
    """
    if "optimizer" in states[0]:
        return states[0]
    inner = sorted((s["state"] for s in states), key=lambda state: int(state["rank"]))
    first = inner[0]
    if [s["rank"] for s in inner] != list(range(first["size"])):
        raise ConfigError(
            f"got the states of ranks {[s['rank'] for s in inner]}, the site had {first['size']} "
            f"ranks; give all of them"
        )
    for key in ("applied_steps", "second_moment", "sizes_by_group"):
        if any(s[key] != first[key] for s in inner):
            raise ConfigError(
                f"the states of the ranks differ in {key}: {[s[key] for s in inner]}; take them "
                f"from one checkpoint"
            )
    if size == first["size"]:
        return next(s for s in states if s["state"]["rank"] == rank)
    regions = make_regions(first["sizes_by_group"])
    owner = torch.zeros_like(first["residual"])
    for shard, state in zip(make_shards(regions, first["size"]), inner, strict=True):
        shard.put(owner, state["owner"])
    mean = sum((s["residual"] for s in inner[1:]), start=first["residual"].clone())
    fitted = {
        **first,
        "rank": rank,
        "size": size,
        "owner": make_shards(regions, size)[rank].take(owner),
        "residual": mean / first["size"],
    }
    return {**states[0], "state": fitted}
