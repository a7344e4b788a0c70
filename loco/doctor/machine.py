"""Checks of this machine alone: versions, devices, collectives, torchft, disk."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loco.doctor.findings import Finding, fail, ok, warn
from loco.status import human_bytes

CHECKPOINT_BYTES_PER_PARAMETER = 16  # theta, error feedback and two moments, fp32


def check_machine() -> Iterator[Finding]:
    """The findings in order; needs neither a coordinator nor the network."""
    yield _versions()
    yield _device()
    yield from _collectives()
    yield _torchft()


def _versions() -> Finding:
    import torch

    return ok(
        "versions",
        f"loco {version('loco')}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"grpcio {version('grpcio')}, {platform.system()} {platform.machine()}",
    )


def _device() -> Finding:
    import torch

    count = torch.cuda.device_count()
    if count:
        try:
            names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
            memory = torch.cuda.get_device_properties(0).total_memory
        except (RuntimeError, AssertionError) as error:  # torch asserts some of its own
            return fail(
                "device",
                f"{count} GPUs are there and cannot be used: {_first_line(error)}",
                "see nvidia-smi and dmesg; CUDA_VISIBLE_DEVICES leaves a broken one out",
            )
        return ok("device", f"{count} GPUs ({names}), {human_bytes(memory)} each")
    why = (
        f"torch {torch.__version__} is a build without CUDA"
        if torch.version.cuda is None
        else f"torch is built for CUDA {torch.version.cuda}, but no GPU is visible"
    )
    return warn(
        "device",
        f"no GPU: {why}",
        "train on CPU (--device cpu), or install torch for your CUDA and check nvidia-smi",
    )


def _collectives() -> Iterator[Finding]:
    """A group of one is made and used: that the library loads, links and runs."""
    import torch
    import torch.distributed as dist

    backends = [("gloo", "cpu")]
    if torch.cuda.device_count():
        backends.append(("nccl", "cuda"))
    for backend, device in backends:
        if not dist.is_backend_available(backend):
            yield fail(
                backend,
                f"this torch is built without {backend}",
                "install a build of torch that has it: the ranks of a site need it",
            )
            continue
        try:
            store = dist.HashStore()  # type: ignore[attr-defined]  # of C++, not in its stubs
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            dist.destroy_process_group()
        except RuntimeError as error:
            yield fail(
                backend,
                f"a group of one rank fails: {_first_line(error)}",
                "see GLOO_SOCKET_IFNAME, NCCL_DEBUG",
            )
        else:
            yield ok(backend, "a group of one rank works")


def _first_line(error: Exception) -> str:
    """torch's messages go on for a page; and some are empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _torchft() -> Finding:
    try:
        found = version("torchft")
        import torchft  # noqa: F401 - a wheel that does not load is found out here
    except PackageNotFoundError:
        wheels = platform.machine() == "x86_64"
        return warn(
            "torchft",
            "not installed: a site loses the round when one of its ranks dies",
            "pip install torchft" if wheels else "build it from source: deploy/docker shows how",
        )
    except (ImportError, OSError) as error:
        return warn(
            "torchft", f"installed, but does not load: {error}", "reinstall it for this Python"
        )
    return ok("torchft", f"version {found}")


def check_disk(directory: Path, num_parameters: int) -> Finding:
    """Whether checkpoints of a site fit beside their successors."""
    there = directory
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    needed = 2 * CHECKPOINT_BYTES_PER_PARAMETER * num_parameters
    message = (
        f"{human_bytes(free)} free at {there}, two checkpoints of this model need "
        f"{human_bytes(needed)}"
    )
    if free < needed:
        return fail("disk", message, "make room, or give another --checkpoint directory")
    if free < 2 * needed:
        return warn("disk", message, "make room: it is less than twice that")
    return ok("disk", message)
