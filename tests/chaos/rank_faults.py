"""The kinds of faults inside a site under torchft: each asserts that the others go on in time.

What became of the steps is asked when the run is over: one hash of all parameters a step on all
ranks, no step twice and none left out (`steps.disagreements`), beside what all runs are asked.
"""

from __future__ import annotations

import random
import signal
import time

from .elastic import JOIN_SECONDS, LIGHTHOUSE_SECONDS, RESUME_SECONDS, ElasticSite
from .processes import World, until

SLEEP_SECONDS = 20.0
PUSH_SECONDS = 8.0  # of a contribution, while its leader dies
PING_SECONDS = 1.0  # a ping on its way to a sleeper is waited for


def rank_dies(world: World, rng: random.Random) -> float:
    """SIGKILL of one rank at a random moment of a step, and another process in its place."""
    site = _site(world)
    slot = rng.choice(sorted(site.nodes))
    _die(site, slot)
    return _come_back(site, slot)


def two_ranks_die(world: World, rng: random.Random) -> float:
    """SIGKILL of two of three at once: the third goes on alone."""
    site = _site(world)
    slots = rng.sample(sorted(site.nodes), 2)
    _die(site, *slots)
    return _come_back(site, *slots)


def rank_sleeps(world: World, rng: random.Random) -> float:
    """SIGSTOP of a rank for 20 s: the others go on, and the sleeper comes back by itself."""
    site = _site(world)
    slot = rng.choice(sorted(site.nodes))
    stopped = time.monotonic()
    site.rank(slot).send_signal(signal.SIGSTOP)
    try:
        site.goes_on(
            *_without(site, slot),
            since=stopped,
            what="from SIGSTOP of a rank to the next step",
            within=RESUME_SECONDS + PING_SECONDS,
        )
        time.sleep(max(0.0, stopped + SLEEP_SECONDS - time.monotonic()))
    finally:
        site.rank(slot).send_signal(signal.SIGCONT)
    awake = time.monotonic()
    what = "from SIGCONT to the first step with the others"
    site.goes_on(*site.nodes, since=awake, what=what, within=JOIN_SECONDS)
    return time.monotonic()


def lighthouse_restarts(world: World, rng: random.Random) -> float:
    """Two members, the lighthouse dies and forgets them, comes back, and a third joins."""
    site = _site(world)
    slot = rng.choice(sorted(site.nodes))
    two = _die(site, slot)
    site.kill_lighthouse()
    time.sleep(rng.uniform(0.0, 4.0))
    site.start_lighthouse()
    site.goes_on(
        *two,
        since=time.monotonic(),
        what="from the start of the lighthouse to the next step",
        within=LIGHTHOUSE_SECONDS,
    )
    return _come_back(site, slot)


def leader_dies_in_a_push(world: World, rng: random.Random) -> float:
    """SIGKILL of the leader while a contribution is under way: another goes on with it."""
    site = _site(world)
    status = until(world.coordinator.status, "the coordinator answers")
    size = status["update_bytes"]
    site.proxy.change(bytes_per_second=size / PUSH_SECONDS)
    begun, wanted = site.proxy.passed["up"], rng.uniform(0.2, 0.8) * size
    until(lambda: site.proxy.passed["up"] - begun > wanted, "a contribution is under way")
    slot = site.leader()
    others = _without(site, slot)
    round_ = world.coordinator.round()
    killed = site.kill_ranks(slot)
    site.proxy.heal()
    world.reach(round_ + 1)
    site.trains(*others, since=killed, what="the others go on after the push")
    return _come_back(site, slot)


def members_1_2_3_2_3(world: World, rng: random.Random) -> float:
    """Down to one, and up again one by one, with another death on the way."""
    site = _site(world)
    slots = rng.sample(sorted(site.nodes), 2)
    _die(site, *slots)
    for slot in slots:
        _come_back(site, slot)
    slot = rng.choice(sorted(site.nodes))
    _die(site, slot)
    return _come_back(site, slot)


def _site(world: World) -> ElasticSite:
    (site,) = (site for site in world.sites.values() if isinstance(site, ElasticSite))
    return site


def _without(site: ElasticSite, *slots: int) -> list[int]:
    """The members that are left, in order of rank."""
    return [slot for slot in site.steps()[-1].members if slot not in slots]


def _die(site: ElasticSite, *slots: int) -> list[int]:
    """Kill ranks; those that are left, after their next step."""
    left = _without(site, *slots)
    died = site.kill_ranks(*slots)
    site.goes_on(
        *left,
        since=died,
        what=f"from the death of {len(slots)} of {len(slots) + len(left)} to the next step",
        within=RESUME_SECONDS,
    )
    return left


def _come_back(site: ElasticSite, *slots: int) -> float:
    """Start ranks again and wait until each trains with all that are there."""
    here = _without(site, *slots)
    for slot in slots:
        site.start_rank(slot)
    what = f"from the start of {len(slots)} to the first step with the others"
    site.goes_on(*here, *slots, since=time.monotonic(), what=what, within=JOIN_SECONDS)
    return time.monotonic()
