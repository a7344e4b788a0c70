"""The one file that a member of a run is handed: private key, certificate, and the authority's.

PEM, in this order. Whoever holds the file is the member, so that others must not be able to read
it. It never leaves the machine that uses it: not in arguments, not in the environment, not in logs.
"""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from loco.certs.identity import Identity, identity_of, when
from loco.errors import ConfigError, RefusedError


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A member's credentials; `read_bundle` has checked that they belong together."""

    path: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    authority: x509.Certificate
    identity: Identity

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def authority_pem(self) -> bytes:
        return self.authority.public_bytes(Encoding.PEM)

    def check_time(self) -> None:
        """RefusedError if this machine's clock is outside the certificate's validity."""
        now = time.time()
        if self.identity.not_before <= now < self.identity.not_after:
            return
        how = "has expired" if now >= self.identity.not_after else "is not valid yet"
        raise RefusedError(
            f"the certificate in {self.path} {how}: it is valid from {self.identity.validity}, and "
            f"this machine's clock says {when(now)}; set the clock, or get a new bundle "
            f"(loco certs issue {self.identity.name})",
            reason="certificate",
        )


def read_bundle(path: Path) -> Bundle:
    """Read and check a bundle; ConfigError says what is wrong with the file."""
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the bundle {path}: {error.strerror}") from error
    key, certificate, authority = _parts(path, data)
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(
            f"the bundle {path} holds a private key and everyone may read it: chmod 600 {path}"
        )
    if _public(certificate) != _public(key):
        raise ConfigError(f"the key in {path} is not that of its certificate: issue a new bundle")
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        raise ConfigError(
            f"the certificate in {path} was not issued by the authority in {path}: "
            "issue a new bundle"
        ) from None
    return Bundle(
        path=path,
        key=key,
        certificate=certificate,
        authority=authority,
        identity=identity_of(certificate),
    )


def _parts(
    path: Path, data: bytes
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate, x509.Certificate]:
    try:
        key = load_pem_private_key(data, None)
        certificate, authority = x509.load_pem_x509_certificates(data)
    except (ValueError, TypeError):
        raise ConfigError(
            f"{path} is not a bundle of a private key, its certificate and the authority's: "
            "loco certs issue NAME makes one"
        ) from None
    signer = authority.public_key()
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(
        signer, ec.EllipticCurvePublicKey
    ):
        raise ConfigError(
            f"the key in {path} or its authority's is not ECDSA: loco certs issue NAME makes both"
        )
    return key, certificate, authority


def _public(owner: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    public = owner.public_key()
    return public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
