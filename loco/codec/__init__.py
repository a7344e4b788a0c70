"""Compression of pseudo-gradients: top-k, sign and levels, indices near their bound, bytes.

    encoded = encode(a, k=64, bits=2, chunk=4096)     # encoded.payload, encoded.dense()
    decoded = decode(encoded.payload, a.numel())      # decoded.indices, .values, .dense()

Importing this package imports neither torch nor numba. The bytes: docs/protocol.md.
"""

from loco.codec.backend import warm_up, warm_up_beside
from loco.codec.body import DenseBody
from loco.codec.feedback import FeedbackEncoded, encode_feedback
from loco.codec.fragment import encode_chunks, encode_fragment
from loco.codec.header import DENSE_BITS, HEADER_BYTES, REASONS, Header, payload_length, peek
from loco.codec.payload import Decoded, Encoded, decode, decode_add, encode, encode_dense
from loco.errors import PayloadError

__all__ = [
    "DENSE_BITS",
    "HEADER_BYTES",
    "REASONS",
    "Decoded",
    "DenseBody",
    "Encoded",
    "FeedbackEncoded",
    "Header",
    "PayloadError",
    "decode",
    "decode_add",
    "encode",
    "encode_chunks",
    "encode_dense",
    "encode_feedback",
    "encode_fragment",
    "payload_length",
    "peek",
    "warm_up",
    "warm_up_beside",
]
