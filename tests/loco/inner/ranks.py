"""Real gloo ranks for the tests: `spawn_ranks(check, (ranks, folder), ranks)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def join_ranks(rank: int, ranks: int, folder: str) -> Iterator[None]:
    """Be one of `ranks` gloo ranks that meet in a file in `folder`; one thread each."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/ranks", ranks)
    # A deadlock becomes an error well before the test's own timeout.
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
