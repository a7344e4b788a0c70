"""`loco.TrainerCallback`: a transformers.Trainer as the training loop of a site.

    trainer = Trainer(model, args, train_dataset=...,
                      callbacks=[loco.TrainerCallback("host:29400", site="paris",
                                                      tokens_per_step=8 * 1024)])

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
    Scheduler, data and random state stay the Trainer's, and so does their place after a restart:
    `trainer.train(resume_from_checkpoint=...)`. Parameters are then the run's, and error feedback
    begins empty.

    Args:
        coordinator: HOST:PORT.
        site: name of the site.
        tokens_per_step: that a rank trains on in one optimizer step, >= 1: its weight in the mean,
            in the tokens that other sites count, too. With sequences of equal length:
            per_device_train_batch_size * gradient_accumulation_steps * length.
        options: further arguments of `loco.join`, but `checkpoint`.

    Raises:
        ConfigError: tokens_per_step is out of range, or a checkpoint of loco's is asked for.
    """

    def __init__(
        self, coordinator: str, *, site: str, tokens_per_step: int, **options: Any
    ) -> None:
        if tokens_per_step < 1:
            raise ConfigError(
                f"tokens_per_step is {tokens_per_step}; it must be at least 1: the tokens that a "
                "rank trains on in one optimizer step"
            )
        # A site that comes back from it makes the steps since then again, and theirs must be the
        # data of before; a Trainer has its place in the data fixed when the callback is asked.
        if options.get("checkpoint") is not None:
            raise ConfigError(
                f"checkpoint={str(options['checkpoint'])!r} does not go with a Trainer, whose data "
                "and schedule would begin anew: leave it out, and restart with "
                "trainer.train(resume_from_checkpoint=...)"
            )
        self._where = coordinator, site
        self._options = options
        self._tokens = tokens_per_step
        self.outer: Outer | None = None
        """The site's membership, while training goes on and after it."""

    def on_train_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002
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
