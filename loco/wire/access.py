"""How a client reaches a coordinator: with a bundle and TLS, or in plaintext where that is allowed.

The one place that makes channels. Plaintext goes to loopback only; anywhere else `--insecure` must
say so. A `Link` takes up a bundle that was renewed on disk, without a restart.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from loco.errors import ConfigError, LocoError, RefusedError, UnreachableError
from loco.wire.protocol import CHANNEL_OPTIONS, split_address
from loco.wire.refusal import refusal_of
from loco.wire.v1 import coordinator_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from cryptography import x509

    from loco.certs.bundle import Bundle

log = logging.getLogger("loco.wire")

_PROBE_SECONDS = 3.0
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Access:
    """What a user said of credentials: the flags --bundle and --insecure."""

    bundle: Path | None = None
    """File from `loco certs issue`."""
    insecure: bool = False
    """Plaintext beyond loopback is meant."""

    def check(self, address: str, site: str | None = None) -> None:
        """ConfigError if these do not fit the address, or the bundle is no good.

        For a worker the bundle must be that of its `site`. RefusedError if its time is over.
        """
        host, _ = split_address(address)
        if self.bundle is not None and self.insecure:
            raise ConfigError("--bundle and --insecure exclude each other: leave one out")
        if self.bundle is not None:
            who = _read(self.bundle).identity
            if site is not None and (who.role, who.name) != ("site", site):
                raise ConfigError(
                    f"{self.bundle} is the bundle of {who}, not of --site {site}: "
                    + (f"use --site {who.name}, or " if who.role == "site" else "use ")
                    + f"the bundle of {site} (loco certs issue {site})"
                )
        elif not self.insecure and not is_loopback(host):
            raise ConfigError(
                f"{address} is not on this machine, and without --bundle everything would travel "
                "in plaintext: get a bundle (loco certs issue), or say --insecure"
            )


def is_loopback(host: str) -> bool:
    """Whether plaintext to or on this host stays on this machine; names other than localhost do
    not count, for they may resolve to anything."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


class Link:
    """A connection to one coordinator; safe to use from several threads."""

    def __init__(self, address: str, access: Access, options: Options = CHANNEL_OPTIONS) -> None:
        """ConfigError if `address` is not HOST:PORT or `access` does not fit it; nothing is sent
        yet. RefusedError if the bundle's time is over."""
        access.check(address)
        self.address = address
        self._access = access
        self._options = options
        self._authority: x509.Certificate | None = None
        self._version = self._file_version()
        self._channel = self._open()
        self._stub = pb_grpc.CoordinatorServiceStub(self._channel)
        if access.insecure:
            log.warning("--insecure: what goes to %s travels in plaintext", address)

    @property
    def stub(self) -> pb_grpc.CoordinatorServiceStub:
        """For the next call: of a new connection if the bundle on disk is another one now."""
        version = self._file_version()
        if version != self._version:
            self._version = version
            try:
                channel = self._open()
            except LocoError as error:  # the old one serves until it ends
                log.error("the renewed bundle is not used: %s", error)
            else:
                log.info("the renewed bundle %s is in use", self._access.bundle)
                # The old channel ends with the calls that still hold it.
                self._channel = channel
                self._stub = pb_grpc.CoordinatorServiceStub(channel)
        return self._stub

    @property
    def authority(self) -> x509.Certificate | None:
        """By whose coordinators history must be signed; None in plaintext."""
        return self._authority

    def close(self) -> None:
        """End all calls; those of other threads raise."""
        self._channel.close()

    def failure(self, error: grpc.RpcError) -> LocoError:
        """What a call that failed comes to, for those who do not repeat it."""
        unreachable = UnreachableError(
            f"no coordinator answers at {self.address} ({error.code().name.lower()}): "
            "check the address and that it runs"
        )
        return refusal_of(error) or self.problem() or unreachable

    def problem(self) -> LocoError | None:
        """After a call got no answer: what no repetition will cure, if that is the reason.

        Connects once more, by the standard library's TLS, because gRPC does not say why.
        """
        path = self._access.bundle
        if path is None:
            return _speaks_tls(self.address)
        try:
            bundle = _read(path)
        except LocoError as error:
            return error
        return _rejected(self.address, bundle)

    def _file_version(self) -> tuple[int, int] | None:
        if self._access.bundle is None:
            return None
        with contextlib.suppress(OSError):
            found = self._access.bundle.stat()
            return found.st_mtime_ns, found.st_ino
        return self._version

    def _open(self) -> grpc.Channel:
        if self._access.bundle is None:
            return grpc.insecure_channel(self.address, options=self._options)
        bundle = _read(self._access.bundle)
        self._authority = bundle.authority
        credentials = grpc.ssl_channel_credentials(
            bundle.authority_pem, bundle.key_pem, bundle.certificate_pem
        )
        return grpc.secure_channel(self.address, credentials, options=self._options)


def _read(path: Path) -> Bundle:
    from loco.certs.bundle import read_bundle  # plaintext needs none of these imports
    from loco.certs.identity import COORDINATOR

    bundle = read_bundle(path)
    if bundle.identity.role == COORDINATOR:
        raise ConfigError(
            f"{path} is the coordinator's own bundle, which only serves: use that of a site, an "
            "operator or a reader (loco certs issue)"
        )
    bundle.check_time()
    return bundle


# --- why a connection failed ----------------------------------------------------------------------


def _speaks_tls(address: str) -> LocoError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is only asked whether it speaks TLS
    try:
        with _connected(address, context):
            return UnreachableError(
                f"the coordinator at {address} speaks TLS and asks for a certificate: "
                "give --bundle FILE (loco certs issue makes it)"
            )
    except OSError:  # ssl.SSLError is one: not TLS, or nobody there
        return None


def _rejected(address: str, bundle: Bundle) -> LocoError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=bundle.authority_pem.decode())
    context.load_cert_chain(bundle.path)
    try:
        with _connected(address, context) as connection:
            if connection.recv(1):  # HTTP/2 settings: it is content with us
                return None
            return RefusedError(
                f"the coordinator at {address} does not accept the certificate of "
                f"{bundle.identity}, valid from {bundle.identity.validity}: its clock is wrong, or "
                "it has another authority; compare the clocks, or get a new bundle",
                reason="certificate",
            )
    except ssl.SSLCertVerificationError as error:
        return UnreachableError(_unverified(address, error, bundle))
    except ssl.SSLError as error:
        if error.reason not in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            return None
        return UnreachableError(
            f"what answers at {address} does not speak TLS: the coordinator was started without "
            "--bundle, or the address is another service's"
        )
    except OSError:
        return None


def _unverified(address: str, error: ssl.SSLCertVerificationError, bundle: Bundle) -> str:
    host, _ = split_address(address)
    told = {
        9: "is not valid yet by this machine's clock: compare the clocks",
        10: "has expired by this machine's clock: renew it (loco certs issue coordinator --role "
        "coordinator), or set the clock",
        62: f"is not made for the name {host}: use a name that it has, or issue one with --host "
        f"{host}",
        64: f"is not made for the address {host}: use a name that it has, or issue one with --host "
        f"{host}",
    }
    # 18 to 21 and 7: the chain does not lead to our authority.
    other = (
        f"was not issued by the authority in {bundle.path} ({error.verify_message}): the address "
        "is another coordinator's, or the bundle another run's"
    )
    return f"the certificate of the coordinator at {address} {told.get(error.verify_code, other)}"


@contextlib.contextmanager
def _connected(address: str, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    host, port = split_address(address)
    with (
        socket.create_connection((host, port), _PROBE_SECONDS) as raw,
        context.wrap_socket(raw, server_hostname=host) as connection,
    ):
        yield connection
