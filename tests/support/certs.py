"""A real authority for tests, and bundles of every kind, sound or not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from coordinator.keys import Keys
from loco.certs.authority import Authority
from loco.wire.protocol import CHANNEL_OPTIONS

HOSTS = ("127.0.0.1", "localhost")
HOUR = timedelta(hours=1)


class Certs:
    """The directory of one authority; `coordinator` is the bundle of its coordinator."""

    def __init__(self, directory: Path, hosts: tuple[str, ...] = HOSTS) -> None:
        self.authority = Authority.create(directory)
        self.coordinator = self.authority.issue("coordinator", role="coordinator", hosts=hosts)

    def keys(self) -> Keys:
        return Keys(self.coordinator)

    def bundle(self, name: str, role: str = "site") -> Path:
        """A sound bundle; the same one for the same name."""
        path = self.authority.directory / f"{name}.pem"
        return path if path.exists() else self.authority.issue(name, role=role)

    def authority_pem(self) -> str:
        return (self.authority.directory / "ca.pem").read_text()

    def nameless(self) -> Path:
        """Of our authority and valid, but it says not who it is."""
        now, key = datetime.now(UTC), ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paris")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.authority.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - HOUR)
            .not_valid_after(now + HOUR)
            .sign(self.authority.key, hashes.SHA256())
        )
        return self._write("nameless", key, certificate)

    def odd(
        self,
        name: str,
        *,
        role: str = "site",
        hosts: tuple[str, ...] = (),
        begin: timedelta = -HOUR,
        end: timedelta = HOUR,
        suffix: str = "odd",
    ) -> Path:
        """A bundle valid from now + `begin` to now + `end`, which `loco certs` would not make."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        certificate = self.authority._sign(role, name, hosts, key, now + begin, now + end)
        return self._write(f"{name}-{suffix}", key, certificate)

    def _write(
        self, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
    ) -> Path:
        path = self.authority.directory / f"{name}.pem"
        pem = Encoding.PEM
        path.touch(0o600)
        path.write_bytes(
            key.private_bytes(pem, PrivateFormat.PKCS8, NoEncryption())
            + certificate.public_bytes(pem)
            + self.authority_pem().encode()
        )
        return path


def channel(address: str, path: Path) -> grpc.Channel:
    """A raw channel with what the bundle holds, whether it belongs together or not."""
    pems = [f"-----BEGIN{part}" for part in path.read_text().split("-----BEGIN")[1:]]
    key, certificate, authority = (pem.encode() for pem in pems)
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    # A pool of its own, or gRPC would share connections between identities.
    options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    return grpc.secure_channel(address, credentials, options=options)
