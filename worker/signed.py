"""What a coordinator has signed, as a site checks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loco.wire.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from cryptography import x509

    from loco.chain import Fact


def signed_fact(
    entry: pb.SignedEntry, authority: x509.Certificate, *, run_id: str, kind: str, round_: int
) -> Fact:
    """The fact of `kind` about a round of the run; LocoError for another or a wrong signature."""
    from loco.chain import Entry, check_fact, verify  # plaintext needs none of its imports

    signed = Entry(
        body=entry.body,
        previous=entry.previous,
        signature=entry.signature,
        certificate=entry.certificate,
    )
    fact = verify(signed, authority)
    check_fact(fact, run_id=run_id, kind=kind, round_=round_)
    return fact
