"""The outer step against NumPy oracles in float64, written from the equations of docs/algorithm.md.

pytest tests/loco/outer/test_step.py
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from loco import codec
from loco.layout import CHUNK
from loco.outer import OuterRules, Piece, apply_update, outer_step

Wide = npt.NDArray[np.float64]
Array = npt.NDArray[np.float32]

NUM = 3 * CHUNK
WEIGHTS = (0.5, 0.3, 0.2)


def rules(aggregation: str, *, alpha: float = 1.0, bits: int = 32) -> OuterRules:
    return OuterRules(aggregation=aggregation, alpha=alpha, momentum=0.9, bits=bits)  # type: ignore[arg-type]


def normal(seed: int, scale: float = 1e-2) -> Array:
    return scale * np.random.default_rng(seed).standard_normal(NUM, dtype=np.float32)


def sparse(seed: int) -> tuple[bytes, Wide]:
    """A contribution, and what it says."""
    encoded = codec.encode(normal(seed), k=64, bits=2)
    dense = np.zeros(NUM)
    dense[encoded.indices] = encoded.values
    return encoded.payload, dense


def piece(payload: bytes, weight: float, *, scale: float = 1.0) -> Piece:
    return Piece(start=0, num_elements=NUM, weight=weight, scale=scale, payload=payload)


def run(given: OuterRules, pieces: list[Piece], **buffers: Array) -> tuple[Array, Array, bytes]:
    """theta and residual after one step from zero, and the payload."""
    theta = buffers.get("theta", np.zeros(NUM, np.float32))
    residual = buffers.get("residual", np.zeros(NUM, np.float32))
    payload = outer_step(
        given, pieces, theta=theta, residual=residual, momentum=buffers.get("momentum")
    )
    return theta, residual, payload


def close(found: Array, wanted: Wide) -> None:
    np.testing.assert_allclose(
        found, wanted, rtol=2e-6, atol=3e-7 * max(1e-3, np.abs(wanted).max())
    )


def test_mean_divides_by_the_weight_of_all() -> None:
    sent = [sparse(seed) for seed in range(3)]
    pieces = [piece(p, w) for (p, _), w in zip(sent, WEIGHTS, strict=True)]
    theta, _, _ = run(rules("mean", alpha=0.7), pieces)
    close(theta, -0.7 * sum(w * v for (_, v), w in zip(sent, WEIGHTS, strict=True)))


def test_mean_contributors_divides_by_the_weight_of_the_senders() -> None:
    sent = [sparse(seed) for seed in range(3)]
    pieces = [piece(p, w) for (p, _), w in zip(sent, WEIGHTS, strict=True)]
    theta, _, _ = run(rules("mean_contributors"), pieces)
    total = sum(w * v for (_, v), w in zip(sent, WEIGHTS, strict=True))
    senders = sum(w * (v != 0) for (_, v), w in zip(sent, WEIGHTS, strict=True))
    close(theta, -np.divide(total, senders, out=np.zeros(NUM), where=senders > 0))
    assert np.count_nonzero(theta) == np.count_nonzero(senders)


def test_one_contributor_counts_in_full_and_a_coordinate_that_nobody_sent_stays() -> None:
    payload, dense = sparse(0)
    theta, _, _ = run(rules("mean_contributors"), [piece(payload, 0.25)])
    close(theta, -dense)


def test_nesterov_over_three_rounds() -> None:
    given = rules("nesterov", alpha=0.7)
    theta, momentum = normal(9, 1.0), np.zeros(NUM, np.float32)
    wide, m = theta.astype(np.float64), np.zeros(NUM)
    for round_ in range(3):
        deltas = [normal(10 * round_ + site) for site in range(2)]
        pieces = [piece(codec.encode_dense(d).payload, 0.5) for d in deltas]
        run(given, pieces, theta=theta, momentum=momentum)
        g = sum(d.astype(np.float64) for d in deltas) / 2
        m = 0.9 * m + g
        wide -= 0.7 * (g + 0.9 * m)
        close(theta, wide)


def test_sparse_nesterov_moves_theta_by_the_momentum_of_what_was_sent() -> None:
    """What was applied and what remains in s are the steps of the definition, over all rounds."""
    given = rules("nesterov", alpha=0.7, bits=2)
    theta, residual, momentum = (np.zeros(NUM, np.float32) for _ in range(3))
    steps, m = np.zeros(NUM), np.zeros(NUM)
    for round_ in range(4):
        sent = [sparse(10 * round_ + site) for site in range(2)]
        pieces = [piece(payload, 0.5) for payload, _ in sent]
        _, _, payload = run(given, pieces, theta=theta, residual=residual, momentum=momentum)
        g = sum(v for _, v in sent) / 2
        m = 0.9 * m + g
        steps += 0.7 * (g + 0.9 * m)
        np.testing.assert_allclose(momentum, m, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(residual - theta, steps, rtol=1e-4, atol=1e-7)
        union = np.count_nonzero(g.reshape(-1, CHUNK), axis=1)
        places = codec.decode(payload, NUM).indices
        np.testing.assert_array_equal(np.bincount(places // CHUNK, minlength=3), union)


def test_the_sign_moves_theta_to_where_the_sites_are() -> None:
    """theta - (theta - theta_r) is theta_r: the pseudo-gradient points away from the sites."""
    theta, there = normal(1, 1.0), normal(2, 1.0)
    payload = codec.encode_dense(theta - there).payload
    moved, _, _ = run(rules("mean"), [piece(payload, 1.0)], theta=theta.copy())
    np.testing.assert_allclose(moved, there, rtol=1e-6, atol=1e-6)


def test_dense_averaging_is_plain_averaging() -> None:
    theta, left, right = normal(1, 1.0), normal(2, 1.0), normal(3, 1.0)
    pieces = [piece(codec.encode_dense(theta - site).payload, 0.5) for site in (left, right)]
    moved, _, _ = run(rules("mean"), pieces, theta=theta.copy())
    np.testing.assert_allclose(moved, (left + right) / 2, rtol=1e-5, atol=1e-6)


def test_the_downlink_loses_nothing() -> None:
    """What was applied and what remains in s are all that was ever aggregated."""
    theta, residual = np.zeros(NUM, np.float32), np.zeros(NUM, np.float32)
    whole = np.zeros(NUM)
    for round_ in range(5):
        sent = [sparse(10 * round_ + site) for site in range(2)]
        pieces = [piece(payload, 0.5) for payload, _ in sent]
        run(rules("mean", bits=2), pieces, theta=theta, residual=residual)
        whole += sum(v for _, v in sent) / 2
        np.testing.assert_allclose(residual - theta, whole, rtol=1e-4, atol=1e-7)
    assert np.count_nonzero(residual) > 0, "otherwise nothing was compressed"


def test_the_downlink_sends_as_many_values_a_chunk_as_the_union() -> None:
    sent = [sparse(seed) for seed in range(3)]
    _, _, payload = run(rules("mean_contributors", bits=2), [piece(p, 1 / 3) for p, _ in sent])
    union = np.count_nonzero(sum(v != 0 for _, v in sent).reshape(-1, CHUNK), axis=1)
    update = codec.decode(payload, NUM)
    np.testing.assert_array_equal(np.bincount(update.indices // CHUNK, minlength=3), union)


@pytest.mark.parametrize("aggregation", ["mean", "mean_contributors", "nesterov"])
@pytest.mark.parametrize("sent", [(), (1,), (0, 2), (0, 1, 2)])
def test_chunks_of_which_nothing_came_are_left_out_and_all_bits_are_as_if_they_were_not(
    aggregation: str, sent: tuple[int, ...]
) -> None:
    """A fragment's round, against the step written out over the whole cell."""
    active = np.repeat(np.isin(np.arange(3), sent), CHUNK)
    pieces = []
    for seed, weight in enumerate((0.7, 0.3)):
        some = np.where(active, normal(seed), np.float32(0))
        pieces.append(piece(codec.encode(some, k=64, bits=2).payload, weight))
    momentum = normal(9)
    theta, residual, payload = run(
        rules(aggregation, alpha=0.9, bits=2),
        pieces,
        theta=normal(7),
        residual=normal(8),
        momentum=momentum,
    )
    total, weights = np.zeros(NUM, np.float32), np.zeros(NUM, np.float32)
    for part in pieces:
        codec.decode_add(part.payload, total, weight=part.weight, weight_acc=weights)
    if aggregation == "mean_contributors":
        total[weights > 0] /= weights[weights > 0]
    if aggregation == "nesterov":
        m = np.where(active, np.float32(0.9) * normal(9) + total, normal(9))
        assert momentum.tobytes() == m.tobytes()
        total = np.where(active, total + np.float32(0.9) * m, np.float32(0))
    s = normal(8) + np.float32(0.9) * total
    union = np.count_nonzero(weights.reshape(3, CHUNK), axis=1)
    d = codec.encode(s, k=union, bits=2)
    s[d.indices] -= d.values
    wanted = normal(7)
    wanted[d.indices] -= d.values
    assert payload == d.payload
    assert (theta.tobytes(), residual.tobytes()) == (wanted.tobytes(), s.tobytes())
    assert (d.num_values > 0) == bool(sent)


def test_a_clipped_contribution_keeps_its_weight() -> None:
    payload, dense = sparse(0)
    theta, _, _ = run(rules("mean_contributors"), [piece(payload, 0.5, scale=0.25)])
    close(theta, -0.25 * dense)


@pytest.mark.parametrize("bits", [1, 2, 32])
def test_a_site_that_applies_the_update_holds_the_same_bits(bits: int) -> None:
    theta, site = normal(1, 1.0), normal(1, 1.0)
    payload_in = codec.encode(normal(2), k=64, bits=2).payload
    _, _, payload = run(rules("mean", bits=bits), [piece(payload_in, 1.0)], theta=theta)
    apply_update(site, payload)
    assert site.tobytes() == theta.tobytes()


def test_a_part_of_a_cell_gets_its_part_of_the_update() -> None:
    payload = codec.encode(normal(2), k=64, bits=2).payload
    whole, cut = normal(1, 1.0), normal(1, 1.0)
    apply_update(whole, payload)
    for start, stop in ((0, CHUNK), (CHUNK, NUM)):
        apply_update(cut[start:stop], payload, cell_elements=NUM, start=start)
    assert cut.tobytes() == whole.tobytes()


def test_shards_of_a_contribution_are_the_contribution() -> None:
    a = normal(5)
    whole = [piece(codec.encode(a, k=64, bits=2).payload, 1.0)]
    shards = [
        Piece(
            start=start,
            num_elements=stop - start,
            weight=1.0,
            scale=1.0,
            payload=codec.encode(a[start:stop], k=64, bits=2).payload,
        )
        for start, stop in ((0, CHUNK), (CHUNK, NUM))
    ]
    one, _, _ = run(rules("mean"), whole)
    two, _, _ = run(rules("mean"), shards)
    assert one.tobytes() == two.tobytes()
