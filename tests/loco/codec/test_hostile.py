"""Bytes that no encoder writes: `PayloadError` with a listed reason, bounded memory, nothing else.

Run alone: python -m pytest tests/loco/codec/test_hostile.py
"""

import contextlib
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.payloads import HEADER, reseal, sections, with_body, with_fields, with_sections

from loco import codec
from loco.codec import backend, kernels, reference
from loco.errors import PayloadError

pytestmark = pytest.mark.usefixtures("active_operations")


def sample(num_elements: int = 500, *, bits: int = 2, chunk: int = 100, k: int = 8) -> bytes:
    """A payload whose chunks send different numbers of values, so that every section is there."""
    a = np.random.default_rng(0).standard_normal(num_elements).astype(np.float32)
    a[:chunk] = 0
    a[chunk + 3 : 2 * chunk] = 0
    return codec.encode(a, k=k, bits=bits, chunk=chunk).payload


def refusal(payload: bytes, num_elements: int = 500) -> str:
    """The reason for which `payload` is refused; never an answer, never another error."""
    with pytest.raises(PayloadError) as caught:
        codec.decode(payload, num_elements)
    assert caught.value.reason in codec.REASONS
    return caught.value.reason


def assert_sound(decoded: codec.Decoded) -> None:
    assert (np.diff(decoded.indices) > 0).all()
    assert ((decoded.indices >= 0) & (decoded.indices < decoded.num_elements)).all()
    assert np.isfinite(decoded.values).all()
    assert decoded.values.dtype == np.float32


@pytest.mark.parametrize(
    "payload", [sample(), codec.encode_dense(np.ones(500, np.float32)).payload]
)
def test_every_truncation_is_refused(payload: bytes) -> None:
    assert {refusal(payload[:size]) for size in range(len(payload))} == {"truncated"}


def test_every_flipped_bit_is_refused() -> None:
    payload = sample()
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        assert refusal(bytes(flipped)) in ("bad_checksum", "bad_magic", "unknown_version")


def test_what_follows_is_refused() -> None:
    assert refusal(sample() + b"\0") == "trailing_bytes"


mutations = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4)


@settings(deadline=None, max_examples=1000)
@given(
    bits=st.sampled_from([1, 2]),
    k=st.integers(1, 20),
    changes=mutations,
    cut=st.integers(0, 8),
    more=st.binary(max_size=8),
)
def test_changed_bodies_with_right_checksums_are_refused_or_sound(
    bits: int, k: int, changes: list[tuple[float, int]], cut: int, more: bytes
) -> None:
    payload = sample(bits=bits, k=k)
    body = bytearray(payload[HEADER : len(payload) - cut] + more)
    for place, flip in changes:
        body[int(place * len(body))] ^= flip
    assert_all_agree(with_body(payload, bytes(body)), 500)


@settings(deadline=None, max_examples=500)
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "bits": st.integers(0, 3) | st.just(32) | st.integers(0, 255),
            "chunk": st.integers(0, 200) | st.integers(0, 65535),
            "k": st.integers(0, 200) | st.integers(0, 65535),
            "num_elements": st.integers(0, 1000) | st.integers(0, 2**64 - 1),
            "num_values": st.integers(0, 1000) | st.integers(0, 2**64 - 1),
            "length": st.integers(0, 1000) | st.integers(0, 2**64 - 1),
        },
    ),
    claim_fits=st.booleans(),
)
def test_changed_headers_with_right_checksums_are_refused_or_sound(
    fields: dict[str, int], claim_fits: bool
) -> None:
    payload = sample()
    if claim_fits:
        fields["length"] = len(payload)
    assert_all_agree(with_fields(payload, **fields), fields.get("num_elements", 500))


def assert_all_agree(payload: bytes, num_elements: int) -> None:
    """Both implementations refuse for one reason, or read the same sound values."""
    answers = []
    for operations in (reference, kernels):
        before, backend._active = backend._active, operations
        try:
            decoded = codec.decode(payload, num_elements)
        except PayloadError as error:
            answers.append(error.reason)
        else:
            assert_sound(decoded)
            answers.append((decoded.indices.tobytes(), decoded.values.tobytes()))
        finally:
            backend._active = before
    assert answers[0] == answers[1]
    assert not isinstance(answers[0], str) or answers[0] in codec.REASONS


def stream(r: int, *values: int) -> bytes:
    """A Rice stream of these values."""
    unary, fields = reference.pack(np.array(values), np.array([len(values)]), np.array([r]))
    return bytes([r]) + len(unary).to_bytes(4, "little") + unary + fields


def non_finite() -> bytes:
    payload = codec.encode_dense(np.ones(500, np.float32)).payload
    return with_body(payload, payload[HEADER:-4] + np.float32(np.inf).tobytes())


SOUND = sample()
UNIFORM = codec.encode(np.ones(500, np.float32), k=8, chunk=100).payload
HIGHS = sections(SOUND)["highs"]
CASES = {
    "bad magic": ("bad_magic", with_fields(SOUND, magic=b"XX")),
    "another version": ("unknown_version", with_fields(SOUND, version=2)),
    "header checksum": ("bad_checksum", SOUND[:36] + b"abcd" + SOUND[40:]),
    "body checksum": ("bad_checksum", SOUND[:-1] + bytes([SOUND[-1] ^ 1])),
    "3 bits": ("bad_header", with_fields(SOUND, bits=3)),
    "chunk 0": ("bad_header", with_fields(SOUND, chunk=0)),
    "chunk too large": ("bad_header", with_fields(SOUND, chunk=32769)),
    "k above chunk": ("bad_header", with_fields(SOUND, k=101)),
    "length below the header's": ("bad_header", with_fields(SOUND, length=39)),
    "length of a giant": ("bad_header", with_fields(SOUND, length=2**63)),
    "dense with a chunk": ("bad_header", with_fields(SOUND, bits=32)),
    "wrong number of elements": ("wrong_size", with_fields(SOUND, num_elements=499)),
    "more values than elements": ("bad_count", with_fields(SOUND, num_values=501)),
    "more values than bits": ("bad_count", with_fields(SOUND, num_values=500)),
    "fewer values than counts": ("bad_count", with_fields(SOUND, num_values=20)),
    "k that makes another number": ("bad_count", with_fields(UNIFORM, k=7)),
    "a count above the chunk": (
        "bad_count",
        with_sections(SOUND, counts=stream(5, 0, 200, 200, 0, 0)),
    ),
    "a count below zero": ("bad_count", with_sections(SOUND, counts=stream(0, 1, 0, 0, 0, 0))),
    "too few counts": ("bad_count", with_sections(SOUND, counts=stream(0, 0, 0, 0, 0))),
    "too many gaps": ("bad_count", with_body(SOUND, SOUND[HEADER:-15] + b"\xff" * 15)),
    "an upper level beyond the values": (
        "bad_count",
        with_sections(SOUND, highs=stream(0, 160)),
    ),
    "Rice parameter 25": ("bad_rice", with_sections(SOUND, highs=bytes([25]) + HIGHS[1:])),
    "a drop below zero": ("bad_rice", with_sections(SOUND, drop=stream(0, 16, 0, 0, 0))),
    "level of zero": ("bad_level", with_sections(SOUND, low=stream(8, 2 * 4064 - 1, 0, 0, 0))),
    "infinite level": ("bad_level", with_sections(SOUND, low=stream(8, 2 * 4096, 0, 0, 0))),
    "position outside its chunk": ("bad_index", UNIFORM),  # replaced below
    "padding of a unary part": (
        "bad_padding",
        with_sections(SOUND, highs=HIGHS[:1] + b"\1\0\0\0\0"),
    ),
    "padding of the signs": ("bad_padding", b""),  # replaced below
    "a section that is cut": ("truncated", with_body(SOUND, SOUND[HEADER:-1])),
    "a section that claims 4 GB": (
        "truncated",
        with_sections(SOUND, highs=HIGHS[:1] + b"\xff" * 4 + HIGHS[5:]),
    ),
    "bytes after the last section": ("trailing_bytes", with_body(SOUND, SOUND[HEADER:] + b"\0")),
    "an infinite dense value": ("non_finite", non_finite()),
}


def far_gap() -> bytes:
    """Eight values a chunk of 100; the first gap's unary part says 100 more."""
    gaps = sections(UNIFORM)["gaps"]
    size = int.from_bytes(gaps[:4], "little")
    unary, fields = bytes(13) + gaps[4 : 4 + size], gaps[4 + size :]
    return with_sections(UNIFORM, gaps=len(unary).to_bytes(4, "little") + unary + fields)


def set_padding() -> bytes:
    signs = bytearray(sections(SOUND)["signs"])
    signs[-1] |= 0x80
    return with_sections(SOUND, signs=bytes(signs))


CASES["position outside its chunk"] = ("bad_index", far_gap())
CASES["padding of the signs"] = ("bad_padding", set_padding())


@pytest.mark.parametrize("name", CASES)
def test_each_fault_has_its_reason(name: str) -> None:
    reason, payload = CASES[name]
    assert refusal(payload) == reason


def test_every_reason_has_a_case() -> None:
    reasons = {reason for reason, _ in CASES.values()} | {refusal(SOUND[:-1])}
    assert reasons == set(codec.REASONS)
    assert list(codec.REASONS) == sorted(codec.REASONS)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_elements": 2**62},
        {"num_elements": 2**62, "chunk": 1},
        {"num_elements": 2**62, "chunk": 1, "k": 1, "num_values": 2**62},
        {"num_elements": 2**62, "length": 2**62},
        {"num_elements": 2**40, "bits": 32, "chunk": 0, "k": 0, "num_values": 2**40},
    ],
)
def test_a_giant_in_a_small_payload_is_refused_before_memory_is_taken(
    fields: dict[str, int],
) -> None:
    payload = with_fields(SOUND, **fields)
    tracemalloc.start()
    refusal(payload, fields["num_elements"])
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def peak_bytes(payload: bytes, num_elements: int) -> int:
    tracemalloc.start()
    with contextlib.suppress(PayloadError):
        codec.decode(payload, num_elements)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("chunk", [1, 4096])
def test_memory_stays_below_the_stated_multiple_of_the_payload(chunk: int) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal(300_000).astype(np.float32)
    for k in {1, chunk // 64 or 1, chunk}:
        payload = codec.encode(a, k=k, chunk=chunk).payload
        assert peak_bytes(payload, len(a)) < 192 * len(payload) + 100_000
    bomb = with_sections(payload, highs=stream(0, *np.zeros(300_000, np.int64)))
    assert peak_bytes(bomb, len(a)) < 192 * len(bomb) + 100_000


@pytest.mark.parametrize("fault", ["position outside its chunk", "truncation"])
def test_decode_add_writes_nothing_unless_all_is_sound(fault: str) -> None:
    payload = CASES[fault][1] if fault in CASES else SOUND[:-1]
    acc = np.ones(500, np.float32)
    with pytest.raises(PayloadError):
        codec.decode_add(payload, acc, weight_acc=acc)
    assert (acc == 1).all()


def test_the_accumulators_must_fit() -> None:
    acc = np.zeros(500, np.float32)
    with pytest.raises(ValueError, match="lengths 500 of acc and 499"):
        codec.decode_add(SOUND, acc, weight_acc=acc[:-1])
    wide: npt.NDArray[np.float64] = acc.astype(np.float64)
    with pytest.raises(ValueError, match="acc: must be contiguous"):
        codec.decode_add(SOUND, wide)  # type: ignore[arg-type]
    assert refusal(SOUND, 501) == "wrong_size"


def test_resealing_a_sound_payload_changes_nothing() -> None:
    assert reseal(SOUND) == SOUND
    assert with_sections(SOUND) == SOUND
