"""Text in, batches out: corpora, the token cache, the order of samples, held-out windows."""

from loco.data.mixture import Weighted, bytes_per_token, check_vocabulary
from loco.data.order import permute
from loco.data.stream import DataStream
from loco.data.tokens import find_corpus, load_parts, load_tokens, prepared_tokenizer
from loco.data.validation import bits_per_byte, evaluate, validation_windows

__all__ = [
    "DataStream",
    "Weighted",
    "bits_per_byte",
    "bytes_per_token",
    "check_vocabulary",
    "evaluate",
    "find_corpus",
    "load_parts",
    "load_tokens",
    "permute",
    "prepared_tokenizer",
    "validation_windows",
]
