"""A disk that fills up, without one: no file of this process may grow beyond a number of bytes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """What a file would take beyond it is refused ("File too large"); Python ignores SIGXFSZ."""
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
