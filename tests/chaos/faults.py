"""The kinds of faults of coordinator, sites and links, and how each is injected and repaired.

A kind is a function of the world and a source of randomness. It returns when the repair began (on
the monotonic clock: the process was started again, the link was healed, the disk had room); what is
measured is how long the run then takes to its next commit.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from coordinator.events import ShardStored
from loco.digest import bytes_digest
from loco.errors import EXIT_USAGE
from loco.wire.blocks import make_block
from loco.wire.protocol import BLOCK_BYTES
from loco.wire.v1 import coordinator_pb2 as pb

from .processes import ROOT, SiteProcess, World, free_port, until
from .proxy import Direction

Fault = Callable[[World, random.Random], float]


# --- the coordinator's process -------------------------------------------------------------------


def kill_at(name: str) -> Fault:
    """SIGKILL when the coordinator passes a named write point, then a restart."""

    def fault(world: World, rng: random.Random) -> float:
        world.coordinator.stop()
        world.coordinator.start(f"{name}:{rng.randint(1, 3)}")
        assert world.coordinator_dies() == -signal.SIGKILL, world.coordinator.tail()
        return _restart(world)

    return fault


def kill_coordinator(world: World, rng: random.Random) -> float:
    """SIGKILL at any moment, and a restart."""
    world.coordinator.kill()
    return _restart(world)


def kill_coordinator_twice(world: World, rng: random.Random) -> float:
    """The second time while it starts."""
    world.coordinator.kill()
    world.coordinator.spawn(world.coordinator.command())
    time.sleep(rng.uniform(0.2, 1.5))
    world.coordinator.kill()
    return _restart(world)


def restart_coordinator(world: World, rng: random.Random) -> float:
    """SIGTERM drains it; then it is started again."""
    world.coordinator.stop()
    return _restart(world)


def _restart(world: World) -> float:
    began = time.monotonic()
    world.coordinator.start()
    return began


def freeze_coordinator(world: World, rng: random.Random) -> float:
    """SIGSTOP for some seconds."""
    world.coordinator.signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 4.0))
    world.coordinator.signal(signal.SIGCONT)
    return time.monotonic()


def second_coordinator(world: World, rng: random.Random) -> float:
    """Another coordinator is started on the same state: it must refuse and do no harm."""
    command = world.coordinator.command(listen=f"127.0.0.1:{free_port()}")
    second = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=90)
    assert second.returncode == EXIT_USAGE, second
    assert b"in use by another coordinator" in second.stderr, second
    return time.monotonic()


def jump_wall_clock(world: World, rng: random.Random) -> float:
    """The coordinator's wall clock jumps by an hour, ahead or back."""
    assert world.coordinator.process is not None
    number = rng.choice((signal.SIGUSR1, signal.SIGUSR2))
    os.kill(world.coordinator.process.pid, number)
    return time.monotonic()


def jump_monotonic_clock(world: World, rng: random.Random) -> float:
    """The coordinator comes back in a time namespace whose monotonic clock is an hour ahead.

    As after a move to another machine: the journal's clock and the new one have nothing in common.
    """
    world.coordinator.kill()
    offset = ("--monotonic", "3600", "--boottime", "3600")
    began = time.monotonic()
    world.coordinator.start(prefix=("unshare", "--time", *offset, "--"))
    return began


def older_state(world: World, rng: random.Random) -> float:
    """Someone restores an old copy of the state: sites past it are refused; then the newer one."""
    coordinator = world.coordinator
    newer, older = (coordinator.state.with_name(name) for name in ("newer", "older"))
    coordinator.stop()
    shutil.copytree(coordinator.state, older)
    coordinator.start()
    world.progress(2)
    coordinator.stop()
    coordinator.state.rename(newer)
    older.rename(coordinator.state)
    coordinator.start()
    until(lambda: _refusals(world, "ahead"), "the sites are refused as ahead")
    coordinator.stop()
    shutil.rmtree(coordinator.state)
    newer.rename(coordinator.state)
    return _restart(world)


def empty_state(world: World, rng: random.Random) -> float:
    """Someone starts a new run at the old address: sites are refused; then the right state."""
    coordinator = world.coordinator
    aside = coordinator.state.with_name("aside")
    coordinator.stop()
    coordinator.state.rename(aside)
    coordinator.start()
    until(lambda: _refusals(world, "run_id"), "the sites are refused for their run id")
    coordinator.stop()
    shutil.rmtree(coordinator.state)
    aside.rename(coordinator.state)
    return _restart(world)


def _refusals(world: World, reason: str) -> bool:
    status = world.coordinator.status()
    return status is not None and any(note["what"] == reason for note in status["refusals"])


def disk_full(world: World, rng: random.Random) -> float:
    """The file system of the state has no byte left for some seconds. Needs one of our own."""
    directory = world.coordinator.state.parent
    assert shutil.disk_usage(directory).total < 1 << 28, f"{directory} is not a small file system"
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    until(lambda: _refusals(world, "disk_full"), "a site is refused for the full disk")
    time.sleep(rng.uniform(0.0, 2.0))
    filler.unlink()
    return time.monotonic()


# --- the sites' processes ------------------------------------------------------------------------


def kill_site(world: World, rng: random.Random) -> float:
    """SIGKILL of all ranks of a site; it comes back from its checkpoint."""
    site = _any(world, rng)
    site.kill()
    return _restart_site(site)


def kill_rank(world: World, rng: random.Random) -> float:
    """SIGKILL of one rank: the site ends, says so, and is started again."""
    site = max(world.sites.values(), key=lambda site: site.num_ranks)
    rng.choice(site.ranks()).kill()
    site.wait()
    return _restart_site(site)


def freeze_site(world: World, rng: random.Random) -> float:
    """SIGSTOP of all ranks of a site for some seconds."""
    site = _any(world, rng)
    site.signal(signal.SIGSTOP)
    time.sleep(rng.uniform(0.5, 5.0))
    site.signal(signal.SIGCONT)
    return time.monotonic()


def freeze_rank(world: World, rng: random.Random) -> float:
    """SIGSTOP of one rank for some seconds."""
    rank = rng.choice(_any(world, rng).ranks())
    rank.suspend()
    time.sleep(rng.uniform(0.5, 5.0))
    rank.resume()
    return time.monotonic()


def _any(world: World, rng: random.Random) -> SiteProcess:
    return world.sites[rng.choice(sorted(world.sites))]


def _restart_site(site: SiteProcess) -> float:
    """Until it has joined; what torch takes to be imported is no time of ours."""
    before = site.log.read_bytes().count(b"joined run")
    site.start()

    def joined() -> bool:
        assert site.alive, site.tail()
        return site.log.read_bytes().count(b"joined run") > before

    until(joined, f"{site.name} has joined again", 300.0)
    return time.monotonic()


# --- the link ------------------------------------------------------------------------------------


def partition(world: World, rng: random.Random) -> float:
    """Connections are reset and refused for some seconds."""
    proxy = _any(world, rng).proxy
    proxy.partition()
    time.sleep(rng.uniform(0.5, 9.0))
    proxy.heal()
    return time.monotonic()


def black_hole(world: World, rng: random.Random) -> float:
    """Connections stay and nothing passes for some seconds."""
    proxy = _any(world, rng).proxy
    proxy.change(flowing=False)
    time.sleep(rng.uniform(0.5, 6.0))
    proxy.heal()
    return time.monotonic()


def slow_link(world: World, rng: random.Random) -> float:
    """An update takes seconds to come, and 0.1 s of latency, for two rounds."""
    proxy = _any(world, rng).proxy
    rate = _update_bytes(world) / rng.uniform(0.5, 3.0)
    proxy.change(bytes_per_second=rate, latency_seconds=0.1)
    world.progress(2)
    proxy.heal()
    return time.monotonic()


def cut_upload(world: World, rng: random.Random) -> float:
    """The connection breaks somewhere in what a site sends."""
    return _cut(world, rng, "up")


def cut_download(world: World, rng: random.Random) -> float:
    """The connection breaks somewhere in what a site receives."""
    return _cut(world, rng, "down")


def _cut(world: World, rng: random.Random, direction: Direction) -> float:
    proxy = _any(world, rng).proxy
    cuts, size = proxy.cuts, _update_bytes(world)
    proxy.change(cut_after={direction: rng.randint(1, 2 * size)})
    until(lambda: proxy.cuts > cuts, "the connection is cut")
    return time.monotonic()


def _update_bytes(world: World) -> int:
    return int(until(world.coordinator.status, "the coordinator answers")["update_bytes"])


def flip_bits(world: World, rng: random.Random) -> float:
    """Bits flip in what a site sends or receives, unnoticed by TCP."""
    proxy = _any(world, rng).proxy
    corrupted, wanted = proxy.corrupted, rng.randint(1, 3)
    direction: Direction = rng.choice(("up", "down"))
    proxy.change(corrupt={direction: wanted})
    until(lambda: proxy.corrupted - corrupted == wanted, "bits are flipped")
    return time.monotonic()


# --- messages ------------------------------------------------------------------------------------


def repeat_push(world: World, rng: random.Random) -> float:
    """A shard that was accepted comes again, byte for byte."""
    captured = rng.choice(_shards(world)[-4:])
    answer = _push_again(world, captured)
    status = until(world.coordinator.status, "the coordinator answers")
    # Rounds go fast: its answer may be forgotten by now, and then it is merely late.
    gone = status["round"] - captured.event.round > status["config"]["state"]["keep_updates"]
    assert answer in ("duplicate", "superseded") or (answer == "stale_round" and gone), answer
    return time.monotonic()


def late_push(world: World, rng: random.Random) -> float:
    """Other bytes come for a round that closed long ago, as if held up on the way."""
    oldest = _shards(world)[0]
    world.progress()
    answer = _push_again(world, oldest, tail=b"late")
    assert answer in ("stale_round", "conflict", "superseded"), answer
    return time.monotonic()


@dataclass(frozen=True)
class _Captured:
    """A shard as it came, while the coordinator still has it."""

    event: ShardStored
    body: bytes


def _shards(world: World) -> list[_Captured]:
    """Accepted shards, oldest first."""

    def capture() -> list[_Captured]:
        root = world.coordinator.state / "contributions"
        names = {path.name: path for path in root.rglob("*") if path.is_file()}
        captured = []
        for event in world.coordinator.events():
            if isinstance(event, ShardStored):
                name = f"{event.site}.{event.incarnation}.{event.shard}.{event.digest}"
                with contextlib.suppress(KeyError, FileNotFoundError):  # it goes with its round
                    captured.append(_Captured(event, names[name].read_bytes()))
        return captured

    return until(capture, "a shard is on disk")


def _push_again(world: World, captured: _Captured, tail: bytes = b"") -> str:
    """Send a shard that was accepted, and `tail`; what it is answered."""
    event, body = captured.event, captured.body + tail
    status = until(world.coordinator.status, "the coordinator answers")
    header = pb.PushHeader(
        caller=pb.Caller(run_id=status["run_id"], site=event.site, incarnation=event.incarnation),
        round=event.round,
        shard=event.shard,
        num_shards=event.num_shards,
        size_bytes=len(body),
        digest=bytes_digest(body),
        tokens=event.tokens,
        inner_steps=event.inner_steps,
        data_cursor=event.data_cursor,
        theta_digest=status["theta_digest"],
    )
    blocks = [body[start : start + BLOCK_BYTES] for start in range(0, len(body), BLOCK_BYTES)]
    messages = [
        pb.PushRequest(header=header),
        *(pb.PushRequest(block=make_block(block)) for block in blocks),
    ]
    try:
        answer = world.coordinator.stub.Push(iter(messages), timeout=30.0)
    except grpc.RpcError as error:
        trailing = dict(iter(error.trailing_metadata() or ()))
        return str(trailing.get("loco-reason", error.code()))
    return "duplicate" if answer.duplicate else "accepted"
