"""loco: train one language model on several clusters that are far apart.

For a training loop of your own: `loco.join`, and `loco.save_parameters` to begin a run with your
model. Everything else is reached through the command line, or in the subpackages.
"""

import os
from importlib.metadata import entry_points
from typing import Any

# gRPC reads its environment when it is imported: this package comes before it in every program.
# It has no switch for the least version of TLS. TLS 1.3 takes its own suites whatever is said here,
# and TLS 1.2 finds none: this one needs a pre-shared key, which nobody has.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-CHACHA20-POLY1305"
# Else every failed handshake writes a line to stderr, at a stranger's will; errors are raised.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_OF_OTHERS = "loco.library"
_OWN = {"save_parameters": "loco.model"}


def __getattr__(name: str) -> Any:
    """Names that need torch or another package of loco's: imported when they are first used."""
    if name in _OWN:
        from importlib import import_module

        return getattr(import_module(_OWN[name]), name)
    for point in entry_points(group=_OF_OTHERS, name=name):
        return point.load()
    raise AttributeError(f"module 'loco' has no attribute {name!r}")
