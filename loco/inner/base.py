"""What a training loop may expect of an inner optimizer that also synchronises its site."""

from __future__ import annotations

from typing import Any, Protocol


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

    def zero_grad(self) -> None:
        """Set the gradients to zero in place; call it before the first micro-batch of a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State of this rank. `loco.inner.reshard` fits it to another number of ranks."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on the same rank; the next step is bit-equal."""
        ...
