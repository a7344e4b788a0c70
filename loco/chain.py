"""The chain of digests over a run's history: what the coordinator has made, and its signature.

One entry an update and a snapshot. Each names the SHA-256 of the bytes and contains the hash of the
entry before, so that nothing can be left out or exchanged; the coordinator signs the hash. Whoever
has the authority's certificate can check history that came from anywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from loco.certs.identity import COORDINATOR, identity_of
from loco.errors import ConfigError, LocoError

FIRST = bytes(32)  # what comes before the first entry
_CONTEXT = b"loco history 1\0"  # so that the signature means this and nothing else


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What an entry states."""

    run_id: str
    kind: str
    """update (which turns theta of `round` into the next) or snapshot (of theta at `round`)."""
    round: int
    sha256: str
    """Of the update's file, or of theta as raw little-endian fp32; hex."""
    size_bytes: int
    theta_digest: str
    """Of theta after the update, or of the snapshot's; hex."""

    def to_json(self) -> str:
        """Canonical: sorted keys, no spaces."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A fact in its place; `signature` and `certificate` (DER) are empty in a plaintext run."""

    body: str
    previous: bytes
    signature: bytes = b""
    certificate: bytes = b""

    @property
    def hash(self) -> bytes:
        """SHA-256 of the entry before and this one's body: the next one's `previous`."""
        return hashlib.sha256(self.previous + self.body.encode()).digest()

    @property
    def fact(self) -> Fact:
        """LocoError if the body is none."""
        try:
            return Fact(**json.loads(self.body))
        except (ValueError, TypeError) as error:
            raise LocoError(f"an entry of the history is malformed: {error}") from error


def sign(entry: Entry, key: ec.EllipticCurvePrivateKey, certificate: bytes) -> Entry:
    """The entry with a signature; `certificate` is DER and belongs to the key."""
    signature = key.sign(_CONTEXT + entry.hash, ec.ECDSA(hashes.SHA256()))
    return dataclasses.replace(entry, signature=signature, certificate=certificate)


def verify(entry: Entry, authority: x509.Certificate | None) -> Fact:
    """What a coordinator of the authority has stated; LocoError if it did not state this.

    Without an authority only the signature is held against the entry's own certificate. That the
    certificate has expired since does not matter: history is older than its readers.
    """
    fact = entry.fact
    what = f"the {fact.kind} of round {fact.round}"
    if not entry.signature:
        raise LocoError(f"{what} is not signed: its coordinator ran without --bundle")
    try:
        certificate = x509.load_der_x509_certificate(entry.certificate)
        if authority is not None:
            certificate.verify_directly_issued_by(authority)
        role = identity_of(certificate).role
        key = certificate.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(entry.signature, _CONTEXT + entry.hash, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, TypeError, AssertionError, ConfigError):
        raise LocoError(
            f"{what} does not carry the signature of a coordinator of this authority: it was "
            "changed, or is another run's"
        ) from None
    if role != COORDINATOR:
        raise LocoError(f"{what} is signed by a {role}, not by a coordinator")
    return fact


def check_fact(fact: Fact, *, run_id: str, kind: str, round_: int) -> None:
    """LocoError if a sound entry is of something else than what was asked for."""
    found, wanted = (fact.run_id, fact.kind, fact.round), (run_id, kind, round_)
    if found != wanted:
        raise LocoError(
            f"the history has {found[1]} {found[2]} of run {found[0]!r} where {kind} {round_} of "
            f"run {run_id!r} belongs"
        )
