"""Loss on held-out text, as sums that the ranks of a site can share out and add up."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from loco.errors import DataError
from loco.tokens import TokenSequence


def validation_windows(tokens: TokenSequence, *, seq_len: int, count: int) -> Tensor:
    """Up to `count` windows [num_windows, seq_len + 1] int64, spread evenly, none overlapping.

    A shorter text gives fewer windows. Rank r of N measures `windows[r::N]`.
    """
    available = (len(tokens) - 1) // seq_len
    if available < 1:
        raise DataError(
            f"the validation text has {len(tokens)} tokens, too few for one sequence: "
            f"model.seq_len = {seq_len} needs {seq_len + 1}; give more text or a shorter one"
        )
    count = min(count, available)
    starts = np.arange(count) * available // count * seq_len
    spans = tokens[starts[:, None] + np.arange(seq_len + 1)]
    return torch.from_numpy(spans.astype(np.int64))


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, *, batch: int = 32) -> tuple[float, int]:
    """Sum of the loss in nats and number of tokens predicted, over windows [num, seq_len + 1].

    `model(inputs, targets)` returns the mean loss in nats. The sums of several ranks add up; no
    window at all gives (0.0, 0). The model's training mode is left as it was found.
    """
    training = model.training
    model.eval()
    nats = 0.0
    for first in range(0, len(windows), batch):
        part = windows[first : first + batch]
        inputs, targets = part[:, :-1], part[:, 1:]
        nats += float(model(inputs, targets)) * targets.numel()
    model.train(training)
    return nats, windows.shape[0] * (windows.shape[1] - 1)


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Mean loss in bits per byte of text; of n tokens, n times `Tokens.bytes_per_token` bytes."""
    return nats / num_bytes / math.log(2)
