"""Who may see the page and the metrics: readers and operators by their certificate, or a token.

On loopback everyone may, unless a token is asked for. Beyond it the server speaks TLS (where the
coordinator has a bundle) and asks everyone; the probes /healthz and /readyz tell nothing and stay
open. A browser sends the token as the password of HTTP basic authentication, Prometheus as a
bearer token.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import ssl
import stat
from pathlib import Path

from aiohttp import web
from cryptography import x509

from coordinator.keys import Keys
from coordinator.refused import RefusedRequest
from loco.certs.bundle import Bundle
from loco.certs.identity import identity_of
from loco.errors import ConfigError
from loco.wire.access import is_loopback
from loco.wire.protocol import split_address

log = logging.getLogger("loco.coordinator")

OPEN = ("/healthz", "/readyz")
_ROLES = ("reader", "operator")
_LEAST_TOKEN = 16  # letters


class Guard:
    """Decides for one address. `context` is None where it speaks plaintext."""

    def __init__(self, address: str, keys: Keys | None = None, token: Path | None = None) -> None:
        """ConfigError if the token's file is no good."""
        exposed = not is_loopback(split_address(address)[0])
        self._keys = keys if exposed else None
        self._token = token
        if token is not None:
            _read_token(token)
        self.context: ssl.SSLContext | None = None
        self._served: Bundle | None = None
        if self._keys is not None:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.minimum_version = ssl.TLSVersion.TLSv1_3
            self.context.verify_mode = ssl.CERT_OPTIONAL  # whoever has a token needs none
            self.context.load_verify_locations(cadata=self._keys.bundle.authority_pem.decode())
            self.renew()

    def renew(self) -> None:
        """Serve the coordinator's present certificate to whoever connects from now on."""
        if self._keys is None or self.context is None or self._served is self._keys.bundle:
            return
        try:
            self.context.load_cert_chain(self._keys.bundle.path)
        except (OSError, ssl.SSLError) as error:
            log.error("the page goes on with its old certificate: %s", error)
            return
        self._served = self._keys.bundle

    def admits(self, request: web.BaseRequest) -> bool:
        """Whether this request may see more than the probes."""
        if self._keys is None and self._token is None:
            return True
        return self._knows(request) or self._is_token(request.headers.get("Authorization", ""))

    def _knows(self, request: web.BaseRequest) -> bool:
        if self._keys is None or request.transport is None:
            return False
        connection = request.transport.get_extra_info("ssl_object")
        certificate = connection.getpeercert(binary_form=True)
        if certificate is None:
            return False
        try:
            identity = identity_of(x509.load_der_x509_certificate(certificate))
            self._keys.check(identity)
        except (ConfigError, RefusedRequest):
            return False
        return identity.role in _ROLES

    def _is_token(self, header: str) -> bool:
        if self._token is None:
            return False
        kind, _, given = header.partition(" ")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return False
        elif kind.lower() != "bearer":
            return False
        try:
            wanted = _read_token(self._token)  # each time, so that it may be replaced
        except ConfigError as error:
            log.error("nobody is let in by token: %s", error)
            return False
        # Bytes that are no UTF-8 arrive as lone surrogates.
        return hmac.compare_digest(given.encode(errors="surrogateescape"), wanted.encode())


def _read_token(path: Path) -> str:
    try:
        mode, token = path.stat().st_mode, path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"everyone may read the token in {path}: chmod 600 {path}")
    if len(token) < _LEAST_TOKEN:
        raise ConfigError(
            f"the token in {path} has {len(token)} letters: use at least {_LEAST_TOKEN}, random"
        )
    return token
