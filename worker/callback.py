"""`loco.TrainerCallback`: a transformers.Trainer as the training loop of a site.

    trainer = Trainer(model, args, train_dataset=...,
                      callbacks=[loco.TrainerCallback("host:29400", site="paris")])

Needs transformers and accelerate (the extra `hf`).
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import TrainerControl, TrainerState, TrainingArguments

from loco.errors import ConfigError
from worker.join import Outer, join


class TrainerCallback(transformers.TrainerCallback):
    """Joins when training begins, exchanges after optimizer steps, stops it when the run is over.

    Give the Trainer more `max_steps` than the run has inner steps: the run decides when it ends.
    Scheduler, data and random state stay the Trainer's.

    Args:
        coordinator: HOST:PORT.
        site: name of the site.
        tokens_per_step: that a rank trains on in one optimizer step, its weight in the mean; by
            default sequences: per_device_train_batch_size * gradient_accumulation_steps.
        options: further arguments of `loco.join`.
    """

    def __init__(
        self, coordinator: str, *, site: str, tokens_per_step: int | None = None, **options: Any
    ) -> None:
        if tokens_per_step is not None and tokens_per_step < 0:
            raise ConfigError(f"tokens_per_step is {tokens_per_step}; it must be at least 0")
        self._where = coordinator, site
        self._options = options
        self._tokens = tokens_per_step
        self.outer: Outer | None = None
        """The site's membership, while training goes on and after it."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Join; the model then holds the run's parameters."""
        coordinator, site = self._where
        optimizer = given["optimizer"]
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self.outer = join(
            coordinator, site=site, model=given["model"], optimizer=inner, **self._options
        )
        if self._tokens is None:
            self._tokens = args.per_device_train_batch_size * args.gradient_accumulation_steps
        control.should_training_stop |= self.outer.finished

    def on_step_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,
        **_: Any,
    ) -> None:
        """One optimizer step is made."""
        assert self.outer is not None
        assert self._tokens is not None
        control.should_training_stop |= not self.outer.step(tokens=self._tokens)

    def on_train_end(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        **_: Any,
    ) -> None:
        """Leave the run."""
        assert self.outer is not None
        self.outer.leave()
