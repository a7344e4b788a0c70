"""What a round will cost, before anything runs: bytes, seconds, utilisation, and what to change.

Sizes come from the codec itself: a sample of chunks is encoded and scaled to the layout. Seconds
come from the codec's measured rates (docs/results/codec_cpu_2026-11-30.md), the link and the step
time. `loco plan` and `loco doctor` both show what `predict` returns. Not modelled: copies between
device and host, the gather of theta inside a site, the coordinator's disk, other traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from loco.codec import HEADER_BYTES, encode
from loco.codec.backend import WORTH_COMPILING
from loco.errors import ConfigError
from loco.layout import CHUNK, Layout, cells
from loco.outer import GUESS_AFTER_STEPS, k_of_site, reducing_threads
from loco.wire.protocol import BLOCK_BYTES, INLINE_UPDATE_BYTES

DENSE_BITS = 32
SAMPLE_CHUNKS = 128  # their sizes scatter by less than 1 %
ENCODE_ELEMENTS_PER_SECOND = 854e6  # one core, compiled; NumPy alone reaches a fifth
NUMPY_SLOWDOWN = 5
DECODE_VALUES_PER_SECOND = 46.1e6  # one core, decoded and added
# The coordinator's process, fitted to docs/results/scaling_fit_cpu_2026-12-01.jsonl:
REDUCE_SECONDS_AN_ELEMENT = 1.32e-9  # selects and encodes the update, writes theta and the residual
REDUCE_SECONDS_A_VALUE = 63e-9  # received ones are checked and added, the update's are made
SERVE_SECONDS_A_SITE = 8.1e-3  # calls, journal and metrics
SERVE_SECONDS_A_BYTE_SENT = 1.41e-9
SERVE_SECONDS_A_BYTE_RECEIVED = 3.26e-9  # written, synced and hashed, too
BLOCK_FRAME_BYTES = 24  # around each block of a transfer
ENVELOPE_BYTES = 110  # an upload's header, counted at a coordinator's transport
FIRST_WINDOW_BYTES = 14_600  # TCP's first flight: ten segments (RFC 6928)
ROUND_TRIPS = 1  # upload, and the update in answer; a large update is pulled: one more
CONGESTION = ("cubic", "bbr")
HANDOVER_STEPS = 3
"""Of a delay: the training thread takes up what has come (acknowledgement, directive, theta) at the
end of an inner step."""
TARGET = 0.95  # utilisation that advice aims at
REPLICA_KEEPS_FROM_K = 128  # docs/lab-log.md, "the end of a run with replicas ..."
MAX_STEPS = 500  # advice goes no further: nobody has measured such rounds


@dataclass(frozen=True, kw_only=True)
class OwnFragment:
    """Tensors with a turn and rules of their own (`outer.own_fragments`)."""

    tensors: frozenset[str]
    k: int
    bits: int


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The run and the network that a prediction is for."""

    layout: Layout
    sites: int
    ranks: int
    """Ranks of each site: they encode and decode in parallel."""
    k: int
    """Values kept of each chunk of 4096 (`codec.k`)."""
    k_sites: int
    """Sites that send so many; more share them (`codec.k_sites`)."""
    bits: int
    """Of a sent value: 1 or 2, or 32 for dense."""
    inner_steps: int
    """H."""
    fragments: int
    """Rounds in which each chunk is exchanged once (`outer.fragments`)."""
    delay_steps: int
    """Inner steps made while the exchange is under way (`outer.delay_steps`)."""
    step_seconds: float
    """Seconds an inner step takes at the slowest site."""
    up_mbit: float
    """From a site to the coordinator, Mbit/s."""
    down_mbit: float
    coordinator_mbit: float | None
    """Link of the coordinator, which all sites share; None: it is never the narrow one."""
    rtt_ms: float
    congestion: str = "cubic"
    """TCP's congestion control at both ends, one of `CONGESTION`: Linux's own, which begins slowly
    again after each pause, or bbr, which remembers the line."""
    own_fragments: tuple[OwnFragment, ...] = ()
    """Each takes a turn; `k`, `bits` and `fragments` are those of all other tensors."""
    coordinator_cores: int = 8
    """Of the coordinator's machine: they share the reduction of a large model."""
    unsent: str = "feedback"
    """Where sites keep what they have not sent (`outer.unsent`): costs nothing, advice asks."""

    @property
    def turns(self) -> int:
        """Rounds in which every chunk is exchanged once."""
        return self.fragments + len(self.own_fragments)

    def parts(self) -> Iterator[tuple[Layout, int, int]]:
        """(tensors, k, bits) of those that obey the same rules; together the whole layout."""
        own = frozenset[str]().union(*(fragment.tensors for fragment in self.own_fragments))
        yield _only(self.layout, lambda name: name not in own), self.k, self.bits
        for fragment in self.own_fragments:
            yield (
                _only(self.layout, fragment.tensors.__contains__),
                fragment.k,
                fragment.bits,
            )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One round, the mean over the turns of fragments; bytes of one site, at gRPC's transport."""

    params: int
    dense_bytes: int
    """The same parameters in fp32."""
    bytes_up: int
    bytes_down: int
    snapshot_bytes: int
    """Down once, when a site joins."""
    bits_per_value_up: float
    compute_seconds: float
    encode_seconds: float
    up_seconds: float
    coordinator_seconds: float
    """Check all contributions, add them, make the update, on its cores; serve the sites, on one."""
    coordinator_cpu_seconds: float
    """The same as if it had one core."""
    down_seconds: float
    apply_seconds: float
    latency_seconds: float
    """Round trips and TCP's slow start."""
    exchange_seconds: float
    """All of a round but its inner steps."""
    round_seconds: float
    """Inner steps, and what of the exchange they do not hide."""
    utilisation: float
    """Share of a round spent in inner steps."""
    utilisation_blocking: float
    """The same without delay: the steps wait for all of the exchange."""
    utilisation_overlapped: float
    """The same with the longest delay, H."""
    bound_by: str
    """compute where `utilisation` is at least 95 %, else the longest part of the exchange."""


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """All rounds of a run, those with another k at its begin and end included; of one site."""

    rounds: int
    bytes_up: int
    bytes_down: int
    dense_bytes: int
    """The parameters in fp32 as often as there are rounds."""
    bytes_up_densest: int
    """Of the round that sends most."""


def check(setting: Setting) -> None:
    """Raise ConfigError for what cannot be, with the flag, the value and the range."""
    ranges = (
        ("--params", setting.layout.num_parameters, 1, 10**13),
        ("--sites", setting.sites, 1, 1000),
        ("--ranks", setting.ranks, 1, 100_000),
        ("--k", setting.k, 1, CHUNK),
        ("--k-sites", setting.k_sites, 1, 1000),
        ("--steps", setting.inner_steps, 1, 1_000_000),
        ("--fragments", setting.fragments, 1, 1000),
        ("--delay-steps", setting.delay_steps, 0, setting.inner_steps),
        ("--step-seconds", setting.step_seconds, 1e-6, 1e6),
        ("--mbit", setting.up_mbit, 1e-3, 1e7),
        ("--mbit-down", setting.down_mbit, 1e-3, 1e7),
        ("--coordinator-cores", setting.coordinator_cores, 1, 1000),
        ("--coordinator-mbit", setting.coordinator_mbit or 1.0, 1e-3, 1e7),
        ("--rtt-ms", setting.rtt_ms, 0, 1e5),
    )
    for flag, value, low, high in ranges:
        if not low <= value <= high:  # false for NaN, too
            raise ConfigError(f"{flag} {value:g} is out of range: {low:g} to {high:g}")
    if setting.bits not in (1, 2, DENSE_BITS):
        raise ConfigError(f"--bits {setting.bits} is not known: use 1, 2, or 32 for dense")
    if setting.congestion not in CONGESTION:
        raise ConfigError(f"--congestion {setting.congestion} is not known: use cubic or bbr")


def predict(setting: Setting) -> Prediction:
    """One round under `setting`; ConfigError if that cannot be."""
    check(setting)
    up, values_up = contribution_size(setting)
    down, values_down = update_size(setting)
    elements = setting.layout.num_elements
    encode_rate = ENCODE_ELEMENTS_PER_SECOND
    if elements < WORTH_COMPILING:
        encode_rate /= NUMPY_SLOWDOWN
    encode = elements / setting.ranks / encode_rate
    reduce = _reduce_seconds(setting, setting.sites * values_up, values_down)
    serve = _serve_seconds(setting.sites, up, down)
    num_cells = len(list(cells(range(setting.layout.num_chunks))))
    threads = reducing_threads(num_cells, setting.coordinator_cores)
    parts = {
        "codec": encode + values_down / setting.ranks / DECODE_VALUES_PER_SECOND,
        "uplink": _transfer_seconds(setting, up, setting.up_mbit),
        "coordinator": reduce / threads + serve,
        "downlink": _transfer_seconds(setting, down, setting.down_mbit),
        "latency": _latency_seconds(setting, up, down),
    }
    compute = setting.inner_steps * setting.step_seconds
    exchange = sum(parts.values())
    longest = max(parts, key=parts.__getitem__)

    def waiting(delay_steps: int) -> float:
        """What of the exchange so many inner steps do not hide."""
        guesses = delay_steps > GUESS_AFTER_STEPS and setting.bits != DENSE_BITS
        first = max(0.0, encode - GUESS_AFTER_STEPS * setting.step_seconds) if guesses else 0.0
        hidden = (delay_steps - HANDOVER_STEPS) * setting.step_seconds
        return min(exchange, first + max(0.0, exchange - first - hidden))

    waits = waiting(setting.delay_steps)
    utilisation = compute / (compute + waits)
    return Prediction(
        params=setting.layout.num_parameters,
        dense_bytes=setting.layout.dense_bytes,
        bytes_up=up,
        bytes_down=down,
        snapshot_bytes=4 * elements,
        bits_per_value_up=8 * up / max(1, values_up),
        compute_seconds=compute,
        encode_seconds=encode,
        up_seconds=parts["uplink"],
        coordinator_seconds=parts["coordinator"],
        coordinator_cpu_seconds=reduce + serve,
        down_seconds=parts["downlink"],
        apply_seconds=values_down / setting.ranks / DECODE_VALUES_PER_SECOND,
        latency_seconds=parts["latency"],
        exchange_seconds=exchange,
        round_seconds=compute + waits,
        utilisation=utilisation,
        utilisation_blocking=compute / (compute + exchange),
        utilisation_overlapped=compute / (compute + waiting(setting.inner_steps)),
        bound_by="compute" if utilisation >= TARGET else longest,
    )


def contribution_size(setting: Setting) -> tuple[int, int]:
    """(bytes that a site sends in a round, values in them)."""
    layout, ranks = setting.layout, min(setting.ranks, setting.layout.num_chunks)
    headers = sum(len(list(cells(layout.shard(rank, ranks)))) for rank in range(ranks))
    bodies = [_body(part, _k_of_site(setting, k), bits) for part, k, bits in setting.parts()]
    body, values = _mean_of_turns(setting, bodies)
    return _framed(body + headers * HEADER_BYTES) + ranks * ENVELOPE_BYTES, values


def update_size(setting: Setting) -> tuple[int, int]:
    """(bytes that a site receives in a round, values in them).

    The update holds as many values a chunk as the sites sent different positions of it. Here the
    sites' choices are independent; real ones agree a little more, and the update is smaller.
    """
    bodies = []
    for part, k, bits in setting.parts():
        sent = _k_of_site(setting, k)
        missed = (1 - sent / CHUNK) ** setting.sites
        union = max(1, round(CHUNK * (1 - missed)))
        bodies.append(_body(part, union, bits, of=(setting.sites, sent)))
    body, values = _mean_of_turns(setting, bodies)
    headers = len(list(cells(range(setting.layout.num_chunks))))
    return _framed(body + headers * HEADER_BYTES), values


def whole_run(times: Mapping[Setting, int]) -> WholeRun:
    """The sum over all rounds, given how many of them are under each setting."""
    sizes = {each: (contribution_size(each)[0], update_size(each)[0]) for each in times}
    return WholeRun(
        rounds=sum(times.values()),
        bytes_up=sum(num * sizes[each][0] for each, num in times.items()),
        bytes_down=sum(num * sizes[each][1] for each, num in times.items()),
        dense_bytes=sum(num * each.layout.dense_bytes for each, num in times.items()),
        bytes_up_densest=max((up for up, _ in sizes.values()), default=0),
    )


def _k_of_site(setting: Setting, k: int) -> int:
    return k_of_site(k, setting.k_sites, setting.sites)


def _mean_of_turns(setting: Setting, bodies: list[tuple[int, int]]) -> tuple[int, int]:
    """(bytes, values) of a round, where `bodies` are those of all chunks."""
    return (
        sum(num_bytes for num_bytes, _ in bodies) // setting.turns,
        sum(values for _, values in bodies) // setting.turns,
    )


def _only(layout: Layout, wanted: Callable[[str], bool]) -> Layout:
    """Those tensors alone."""
    return Layout.of((p.name, p.shape) for p in layout.parameters if wanted(p.name))


def advice(setting: Setting) -> list[str]:
    """What to change in k, bits or H so that sites compute 95 % of the time, with its effect."""
    now = predict(setting)
    if now.utilisation >= TARGET:
        return _room(setting)
    lines = []
    hides = math.ceil(now.exchange_seconds / setting.step_seconds) + HANDOVER_STEPS
    if hides <= setting.inner_steps:
        then = predict(replace(setting, delay_steps=hides))
        rest = "" if then.round_seconds == then.compute_seconds else ", but for encoding"
        lines.append(f"outer.delay_steps = {hides} hides the exchange behind inner steps{rest}")
    left = now.round_seconds - now.compute_seconds
    steps = math.ceil(left * TARGET / (1 - TARGET) / setting.step_seconds)
    if steps <= MAX_STEPS:
        lines.append(f"inner.steps = {steps} makes it {TARGET:.0%}: the exchange comes less often")
    else:
        lines.append(
            f"more inner steps alone do not help: {TARGET:.0%} would take {steps}; rounds of more "
            f"than {MAX_STEPS} steps are not known to train well"
        )
    for key, value, changed in _smaller(setting):
        then = predict(changed)
        lines.append(
            f"{key} = {value} makes it {then.utilisation:.0%}, "
            f"and a site sends {then.bytes_up / now.bytes_up:.0%} of the bytes"
        )
    quick = predict(replace(setting, congestion="bbr"))
    if quick.exchange_seconds < 0.8 * now.exchange_seconds:
        lines.append(
            "net.ipv4.tcp_congestion_control = bbr, on this host and the coordinator's, makes it "
            f"{quick.utilisation:.0%}: TCP does not begin slowly in each round"
        )
    if setting.ranks == 1 and now.bound_by == "codec":
        lines.append("more ranks a site share the coding: see --ranks")
    return lines


def _smaller(setting: Setting) -> list[tuple[str, int, Setting]]:
    changes = []
    if setting.bits == DENSE_BITS:
        changes.append(("codec.bits", 2, replace(setting, bits=2)))
        return changes
    if setting.bits == 2:
        changes.append(("codec.bits", 1, replace(setting, bits=1)))
    if setting.k > 1:
        half = setting.k // 2
        changes.append(("codec.k", half, replace(setting, k=half)))
    return changes


def _room(setting: Setting) -> list[str]:
    """The densest k that still leaves the sites computing: it trains better, at no cost here."""
    best = setting.k
    while setting.bits != DENSE_BITS and 2 * best <= CHUNK // 4:
        if predict(replace(setting, k=2 * best)).utilisation < TARGET:
            break
        best *= 2
    told = f"nothing: sites compute at least {TARGET:.0%} of the time"
    if best > setting.k:
        told = (
            f"the link has room: with codec.k = {best} sites still compute {TARGET:.0%} of the "
            "time, and a denser contribution trains better"
        )
    if setting.bits == DENSE_BITS or setting.unsent == "replica" or best < REPLICA_KEEPS_FROM_K:
        return [told]
    return [
        told,
        f"from codec.k = {REPLICA_KEEPS_FROM_K} on, outer.unsent = 'replica' with beta = 0 and "
        "aggregation = 'mean' trains better, where a value is sent more than twice in the run",
    ]


def _reduce_seconds(setting: Setting, received: int, made: int) -> float:
    """Of a round with so many values received from all sites and made of them."""
    elements = setting.layout.num_elements
    if setting.bits == DENSE_BITS:  # added as they are; not measured apart
        return (setting.sites + 1) * elements * REDUCE_SECONDS_AN_ELEMENT
    values = 2 * received + made
    return elements * REDUCE_SECONDS_AN_ELEMENT + values * REDUCE_SECONDS_A_VALUE


def _serve_seconds(sites: int, up: int, down: int) -> float:
    """Receive `up` bytes from each site and send it `down`."""
    bytes_ = up * SERVE_SECONDS_A_BYTE_RECEIVED + down * SERVE_SECONDS_A_BYTE_SENT
    return sites * (SERVE_SECONDS_A_SITE + bytes_)


def _transfer_seconds(setting: Setting, num_bytes: int, mbit: float) -> float:
    rate = mbit
    if setting.coordinator_mbit is not None:
        rate = min(rate, setting.coordinator_mbit / setting.sites)
    return 8 * num_bytes / (rate * 1e6)


def _latency_seconds(setting: Setting, up: int, down: int) -> float:
    rtt = setting.rtt_ms / 1e3
    trips = float(ROUND_TRIPS + (down > INLINE_UPDATE_BYTES))
    for num_bytes, mbit in ((up, setting.up_mbit), (down, setting.down_mbit)):
        in_flight = min(num_bytes, mbit * 1e6 / 8 * rtt)
        doublings = math.log2(max(1.0, in_flight / FIRST_WINDOW_BYTES))
        # bbr: one trip more or less, as measured (docs/results/wan_cpu_2026-11-30.md).
        trips += doublings if setting.congestion == "cubic" else min(1.0, doublings)
    return trips * rtt


def _framed(num_bytes: int) -> int:
    return num_bytes + -(-num_bytes // BLOCK_BYTES) * BLOCK_FRAME_BYTES


def _body(
    layout: Layout, k: int, bits: int, *, of: tuple[int, int] | None = None
) -> tuple[int, int]:
    """(bytes of all payloads without their headers, values in them), at k values a chunk.

    `of`: they are an update of so many sites, with so many values a chunk each.
    """
    if bits == DENSE_BITS:
        return 4 * layout.num_elements, layout.num_elements
    full = sum(p.numel // CHUNK for p in layout.parameters)
    short = [p.numel % CHUNK for p in layout.parameters if p.numel % CHUNK]
    sites, sent = of or (1, k)
    total = full * _sampled_bytes((CHUNK,), sent, bits, sites) if full else 0.0
    if short:
        lengths = tuple(short[:: max(1, len(short) // SAMPLE_CHUNKS)])
        total += len(short) * _sampled_bytes(lengths, sent, bits, sites)
    return round(total), full * k + sum(min(k, length) for length in short)


@lru_cache(maxsize=256)
def _sampled_bytes(lengths: tuple[int, ...], k: int, bits: int, sites: int) -> float:
    """Mean bytes of a chunk in a payload, header left out, of chunks with these lengths.

    Of a contribution, or of an update where there are several sites. Normal numbers with a
    log-normal scale for each chunk: a contribution is then within 3 % of real pseudo-gradients
    (docs/results/codec_cpu_2026-11-30.md).
    """
    rng = np.random.default_rng(0)
    rows = max(8, SAMPLE_CHUNKS // sites, len(lengths))
    present = np.arange(CHUNK) < np.resize(lengths, rows)[:, None]  # [rows, CHUNK]
    scale = np.float32(rng.lognormal(size=(rows, 1))) * present
    total, senders = np.zeros((2, rows * CHUNK), np.float32)
    for _ in range(sites):
        a = rng.standard_normal((rows, CHUNK), np.float32) * scale
        contribution = encode(a, k=k, bits=bits, chunk=CHUNK)
        total[contribution.indices] += contribution.values
        senders[contribution.indices] += 1
    if sites > 1:
        np.divide(total, senders, out=total, where=senders > 0)
        union = np.count_nonzero(senders.reshape(rows, CHUNK), axis=1)
        contribution = encode(total, k=union, bits=bits, chunk=CHUNK)
    return (len(contribution.payload) - HEADER_BYTES) / rows
