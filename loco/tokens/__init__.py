"""Token files: `loco data prepare` makes them of any text, `loco.data` trains on them.

Importing this package does not import torch: every process that tokenises would wait for it.
"""

from loco.tokens.prepared import check_prepared, is_prepared, load_prepared, read_manifest
from loco.tokens.shards import BYTES, Tokens, TokenSequence, join, one_tokenizer

__all__ = [
    "BYTES",
    "TokenSequence",
    "Tokens",
    "check_prepared",
    "is_prepared",
    "join",
    "load_prepared",
    "one_tokenizer",
    "read_manifest",
]
