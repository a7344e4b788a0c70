"""Text in, batches out: corpora, the token cache, the order of samples, held-out windows."""

from loco.data.corpus import Split
from loco.data.order import permute
from loco.data.stream import DataStream
from loco.data.tokens import Tokens, load_tokens
from loco.data.validation import bits_per_byte, evaluate, validation_windows

__all__ = [
    "DataStream",
    "Split",
    "Tokens",
    "bits_per_byte",
    "evaluate",
    "load_tokens",
    "permute",
    "validation_windows",
]
