"""How fast the codec encodes and decodes on one core, beside a copy and a plain encoder; memory.

Encode is `encode_feedback` on payloads of 4 Mi elements, as a worker calls it, over buffers that do
not fit the caches; it counts 16 bytes a parameter (theta, params, EF in; EF out). The copy is
np.copyto over buffers of the same size, bytes read plus written. The candidates take turns at
each payload; the best of several rounds counts, because other processes only ever add to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.codec_rivals import plain_encode
from loco import codec

NUM_ELEMENTS = 1 << 25
PAYLOAD_ELEMENTS = 1 << 22
ROUNDS = 9
K = 64


def measure_speed() -> dict[str, Any]:
    """Speeds and ratios of one core."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    theta, params, ef, target = (
        rng.standard_normal(NUM_ELEMENTS, dtype=np.float32) for _ in range(4)
    )
    plain_ef = ef.copy()
    cuts = [slice(i, i + PAYLOAD_ELEMENTS) for i in range(0, NUM_ELEMENTS, PAYLOAD_ELEMENTS)]
    encoded = [codec.encode_feedback(theta[c], params[c], ef[c], k=K) for c in cuts]

    def copy(cut: slice) -> None:
        np.copyto(target[cut], theta[cut])

    def encode(cut: slice) -> None:
        encoded[cut.start // PAYLOAD_ELEMENTS] = codec.encode_feedback(
            theta[cut], params[cut], ef[cut], k=K
        )

    def plain(cut: slice) -> None:
        parts = (torch.from_numpy(x[cut]) for x in (theta, params, plain_ef))
        plain_encode(*parts, beta=0.95, k=K)

    def decode(cut: slice) -> None:
        payload = encoded[cut.start // PAYLOAD_ELEMENTS].payload
        codec.decode_add(payload, target[cut], weight=0.5)

    seconds = _alternate({"copy": copy, "encode": encode, "plain": plain, "decode": decode}, cuts)
    num_values = sum(e.num_values for e in encoded)
    copied = 8 * NUM_ELEMENTS / seconds["copy"]
    return {
        "copy_gbytes_per_second": copied / 1e9,
        "encode_mparams_per_second_core": NUM_ELEMENTS / seconds["encode"] / 1e6,
        "encode_fraction_of_copy_bandwidth": 16 * NUM_ELEMENTS / seconds["encode"] / copied,
        "plain_mparams_per_second_core": NUM_ELEMENTS / seconds["plain"] / 1e6,
        "speedup_over_plain": seconds["plain"] / seconds["encode"],
        "decode_mvalues_per_second_core": num_values / seconds["decode"] / 1e6,
        "threads": _threads(theta, params, ef),
    }


def _alternate(
    candidates: dict[str, Callable[[slice], None]], cuts: list[slice]
) -> dict[str, float]:
    """CPU seconds of one pass over all cuts, by candidate: each cut's best of `ROUNDS`."""
    best = {name: [np.inf] * len(cuts) for name in candidates}
    for _ in range(ROUNDS):
        for i, cut in enumerate(cuts):
            for name, work in candidates.items():
                start = time.thread_time()
                work(cut)
                best[name][i] = min(best[name][i], time.thread_time() - start)
    return {name: sum(times) for name, times in best.items()}


def _threads(theta: np.ndarray, params: np.ndarray, ef: np.ndarray) -> dict[str, float]:
    """Wall-clock speed-up over one thread, by number of threads, as far as the machine has them."""
    best: dict[int, float] = {}
    for _ in range(3):
        for n in (1, 2, 4, 8):
            if n > (os.cpu_count() or 1):
                continue
            start = time.perf_counter()
            codec.encode_feedback(theta, params, ef, k=K, num_threads=n)
            best[n] = min(best.get(n, np.inf), time.perf_counter() - start)
    return {str(n): best[1] / seconds for n, seconds in best.items()}


def measure_memory() -> dict[str, float]:
    """Peak memory beyond the input while encoding, over the input's bytes (Linux; else empty)."""
    if not Path("/proc/self/clear_refs").exists():
        return {}
    rng = np.random.default_rng(0)
    a, zero = rng.standard_normal(1 << 26, dtype=np.float32), np.zeros(1 << 26, np.float32)
    ef = zero.copy()
    encode = _peak(lambda: codec.encode(a, k=K))
    feedback = _peak(lambda: codec.encode_feedback(a, zero, ef, k=K))
    return {"encode": encode / a.nbytes, "encode_feedback": feedback / (3 * a.nbytes)}


def _peak(work: Callable[[], object]) -> int:
    """Bytes by which the resident memory rose at its highest."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
