"""Child processes that never outlive their parent, and that always end in bounded time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

from loco.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, LocoError

_PACKAGES = frozenset({"loco", "coordinator", "worker"})
_PR_SET_PDEATHSIG = 1
_PARENT = "LOCO_PARENT_PID"
_MOST_FILES = 65_536
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h


def spawn(
    command: list[str], env: dict[str, str] | None = None, stderr: BinaryIO | None = None
) -> subprocess.Popen[bytes]:
    """Start a child that is told to die with this process (see `die_with_parent`)."""
    environment = {**os.environ, **(env or {}), _PARENT: str(os.getpid())}
    return subprocess.Popen(command, env=environment, stderr=stderr)


def die_with_parent() -> None:
    """Called by a child of `spawn`: the kernel kills it when its parent ends, however that ends."""
    parent = os.environ.pop(_PARENT, None)
    if parent is None:
        return
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before we asked
        os._exit(1)


def exit_code_of(work: Callable[[], object]) -> int:
    """Do `work`; its exit code, with an error that a person can cause printed as one line."""
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED
    except LocoError as error:
        print(f"loco: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("loco: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as error:  # a full or read-only disk, in a place that does not expect it
        print(f"loco: this machine refused: {error} ({_place_of(error)})", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DONE


def _place_of(error: BaseException) -> str:
    """The innermost line of ours on an error's way."""
    calls = traceback.extract_tb(error.__traceback__)
    ours = [call for call in calls if not _PACKAGES.isdisjoint(Path(call.filename).parts)]
    place = (ours or calls)[-1]
    return f"{Path(place.filename).name}, line {place.lineno}"


def end_with(work: Callable[[], object]) -> NoReturn:
    """Do `work` and end this process with its exit code, at once.

    The interpreter is not torn down: after an error or Ctrl+C other ranks are not asked any more,
    and a collective in flight would hold the process until its time-out, or abort it and so take
    the place of the exit code.
    """
    code = exit_code_of(work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def give_memory_back() -> None:
    """Make glibc return large buffers to the system, also those that threads have freed.

    By default it keeps freed buffers of up to 32 MiB, in an arena for each of several threads: a
    coordinator of 4 M parameters and 16 sites came to 308 and 323 MB, and to 265 MB with this.
    Elsewhere it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 2)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def raise_file_limit() -> int:
    """Let this process open as many files as it is allowed to, up to 65,536; their number."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MOST_FILES if n == resource.RLIM_INFINITY else n for n in limits)
    most = max(soft, min(hard, _MOST_FILES))
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    return most


def interrupt_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl+C does; the first of either counts, others are ignored.

    A second KeyboardInterrupt while the first unwinds a lock would end in a traceback. A terminal
    sends Ctrl+C to every process, and a launcher then tells its children once more.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        ignore_interrupts()
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl+C waits while the block runs; a child that is started in it never sees one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def ignore_interrupts() -> None:
    """From now on this process only says goodbye; it must do so in bounded time.

    Not SIG_IGN: a signal that had arrived already would then end in an OSError of Python's.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: None)


def stop_all(children: Iterable[subprocess.Popen[bytes]], *, grace_seconds: float = 5.0) -> None:
    """SIGTERM to all that still run; SIGKILL to those that have not ended after the grace."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.send_signal(signal.SIGTERM)
    until = time.monotonic() + grace_seconds
    for child in running:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
