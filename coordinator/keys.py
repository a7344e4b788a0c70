"""The coordinator's own credentials and what is revoked: read again when the files change."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

import grpc

from coordinator.refused import RefusedRequest
from loco.certs.authority import read_revoked
from loco.certs.bundle import Bundle, read_bundle
from loco.certs.identity import COORDINATOR, Identity, when
from loco.errors import ConfigError, LocoError

log = logging.getLogger("loco.coordinator")

REVOKED = "revoked.pem"  # beside the bundle
_LOOK_SECONDS = 1.0  # between looks at the files


class Keys:
    """A bundle and the revocation list beside it; safe to use from gRPC's own threads.

    On failure to read a renewed file the old one stays in use, and the log says so.
    """

    def __init__(self, path: Path) -> None:
        """ConfigError if the bundle is not a coordinator's, or a file is no good."""
        self._path = path
        self._lock = threading.Lock()
        self._seen = self._versions()
        self._looked_at = time.monotonic()
        self._revoked: frozenset[int] = frozenset()
        self.bundle = self._read_bundle()
        self._served = self.bundle
        self._revoked = self._read_revoked()

    # --- what the server needs ------------------------------------------------------------------

    def credentials(self) -> grpc.ServerCredentials:
        """Mutual TLS: whoever has no certificate of the authority does not come in at all."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self.bundle),
            self._renewed,  # type: ignore[arg-type] # the stubs forget that None means: unchanged
            require_client_authentication=True,
        )

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called at each handshake; None for: as before."""
        self.look()
        with self._lock:
            if self._served is self.bundle:
                return None
            self._served = self.bundle
            return _configuration(self.bundle)

    def check(self, identity: Identity) -> None:
        """RefusedRequest if a certificate that was valid at the handshake is not any more."""
        self.look()
        if identity.serial in self._revoked:
            raise RefusedRequest(
                "revoked",
                f"the certificate of {identity} (serial {identity.serial:x}) is revoked: get a new "
                "bundle from whoever runs this coordinator",
            )
        now = time.time()
        if now >= identity.not_after:
            raise RefusedRequest(
                "expired",
                f"the certificate of {identity} was valid until {when(identity.not_after)}, here "
                f"it is {when(now)}: put a new bundle in the place of the old one",
            )

    # --- files ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what has changed on disk, at most once a second."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        with self._lock:
            self._looked_at = time.monotonic()
            versions = self._versions()
            if versions == self._seen:
                return
            self._seen = versions
            for take in (self._take_bundle, self._take_revoked):  # one works without the other
                try:
                    take()
                except LocoError as error:
                    log.error("the new credentials are not used, the old ones stay: %s", error)
            log.info(
                "credentials looked at again: valid until %s, %d certificates revoked",
                when(self.bundle.identity.not_after),
                len(self._revoked),
            )

    def _take_bundle(self) -> None:
        bundle = self._read_bundle()
        if bundle.identity.serial != self.bundle.identity.serial:
            self.bundle = bundle

    def _take_revoked(self) -> None:
        self._revoked = self._read_revoked()

    def _read_bundle(self) -> Bundle:
        bundle = read_bundle(self._path)
        if bundle.identity.role != COORDINATOR:
            raise ConfigError(
                f"{self._path} is the bundle of {bundle.identity}: a coordinator needs "
                f"{COORDINATOR}.pem of loco certs init"
            )
        bundle.check_time()
        return bundle

    def _read_revoked(self) -> frozenset[int]:
        revoked = self._path.with_name(REVOKED)
        if not revoked.exists():
            if self._revoked:  # its loss must not bring anyone back
                raise ConfigError(f"{revoked} is gone")
            log.warning("there is no %s: no certificate is taken for revoked", revoked)
            return frozenset()
        return read_revoked(revoked, self.bundle.authority)

    def _versions(self) -> tuple[tuple[int, int] | None, ...]:
        return tuple(map(_version, (self._path, self._path.with_name(REVOKED))))


def _version(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_ino
    return None


def _configuration(bundle: Bundle) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(bundle.key_pem, bundle.certificate_pem)], bundle.authority_pem
    )
