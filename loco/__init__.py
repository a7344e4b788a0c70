"""loco: train one language model on several clusters that are far apart."""

import os

# gRPC reads its environment when it is imported: this package comes before it in every program.
# It has no switch for the least version of TLS. TLS 1.3 takes its own suites whatever is said here,
# and TLS 1.2 finds none: this one needs a pre-shared key, which nobody has.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-CHACHA20-POLY1305"
# Else every failed handshake writes a line to stderr, at a stranger's will; errors are raised.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
