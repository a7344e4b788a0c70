"""What a training loop may expect of an inner optimizer that also synchronises its site."""

from __future__ import annotations

from typing import Any, Protocol

from loco.inner.groups import Group
from loco.inner.moving import Change, Held


class InnerOptimizer(Protocol):
    """One optimizer step of a site: synchronise the ranks, clip, update. Every rank calls it.

    On failure of a rank, `step` raises on the others as soon as the backend notices; parameters
    and state are then those of the step before, or those after it, never a mixture.
    """

    param_groups: list[dict[str, Any]]
    """As in torch.optim; set `group["lr"]` before `step`."""

    skipped_steps: int
    """Steps that all ranks skipped together because a gradient was not finite on one of them."""

    last_grad_norm: float
    """Norm before clipping of the gradient that the last step applied; not finite if skipped."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank handed to the collectives since construction."""
        ...

    def step(self) -> None:
        """Synchronise gradients over the ranks and update the parameters, equally on all."""
        ...

    def stage(self) -> Any:
        """Everything of a step that needs other ranks; it changes neither parameters nor state."""
        ...

    def settle(self, staged: Any) -> Any:
        """The same, once nothing of it is on its way any more."""
        ...

    def commit(self, staged: Any) -> None:
        """Apply what `stage` returned; it needs no other rank and cannot fail on one only."""
        ...

    def zero_grad(self) -> None:
        """Set the gradients to zero in place; call it before the first micro-batch of a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State of this rank. `loco.inner.reshard` fits it to another number of ranks."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on the same rank; the next step is bit-equal."""
        ...

    def common_state(self) -> dict[str, Any]:
        """The part of the state that all ranks have alike: a rank that joins starts from it."""
        ...

    def load_common_state(self, state_dict: dict[str, Any]) -> None:
        """Take what `common_state` gave on another rank."""
        ...

    def held(self) -> Held | None:
        """What this rank alone has, shared; None where all ranks have everything alike."""
        ...

    def held_after(self, staged: Any) -> Held | None:
        """What `held` will be after `commit(staged)`, as copies."""
        ...

    def held_in(self, state: dict[str, Any]) -> Held | None:
        """What `held` will be after `regroup` with this state."""
        ...

    def move(self, group: Group, change: Change, held: dict[int, Held]) -> dict[str, Any]:
        """This rank's state among the ranks of `group`, which all call it; nothing changes yet."""
        ...

    def regroup(self, group: Group, state: dict[str, Any]) -> None:
        """Go on in `group` with what `move` returned; it needs no other rank."""
        ...
