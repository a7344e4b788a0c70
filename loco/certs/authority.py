"""The private authority of a run: a directory that makes bundles and revokes them.

ca.key        its private key; stays here, and nothing but `loco certs` reads it
ca.pem        its certificate
NAME.pem      bundles, mode 0600: hand each to the one it names
issued.json   what was issued, for `list`, `revoke` and for the next coordinator's names
revoked.pem   X.509 revocation list, signed; the coordinator reads it again when it changes
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from loco.certs.identity import COORDINATOR, NAME, ROLES, uri_of
from loco.errors import ConfigError

CA_DAYS = 730
DAYS = 30
MAX_DAYS = 366
SKEW = timedelta(minutes=5)  # a certificate is valid from so long before it was made
_RESERVED = ("ca", "revoked")


@dataclass(frozen=True, kw_only=True)
class Issued:
    """One certificate that was made. Times are Unix seconds."""

    role: str
    name: str
    serial: str
    """Hex: JSON numbers are not exact beyond 53 bits."""
    not_after: float
    hosts: tuple[str, ...] = ()
    """Of the coordinator: names and addresses at which clients may reach it."""
    revoked_at: float | None = None

    def state(self, now: float) -> str:
        """valid, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if now >= self.not_after else "valid"


@dataclass
class Authority:
    """Use `Authority.create` or `Authority.open`."""

    directory: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    issued: list[Issued] = field(default_factory=list)

    # --- opening --------------------------------------------------------------------------------

    @classmethod
    def create(cls, directory: Path, days: int = CA_DAYS) -> Authority:
        """Make a new authority; ConfigError if the directory has one."""
        if (directory / "ca.key").exists():
            raise ConfigError(
                f"{directory} holds an authority already: loco certs issue makes more bundles, "
                "another directory another authority"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        # Two authorities have two names, so that a mix-up is reported as one.
        name = _name(f"loco authority {secrets.token_hex(4)}")
        now = datetime.now(UTC)
        certificate = (
            _begin(name, name, key.public_key(), key, now, now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        authority = cls(directory, key, certificate)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _write(directory / "ca.key", _key_pem(key), private=True)
            _write(directory / "ca.pem", certificate.public_bytes(Encoding.PEM))
        except OSError as error:
            raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
        authority._save()
        return authority

    @classmethod
    def open(cls, directory: Path) -> Authority:
        """ConfigError if the directory holds none, or a damaged one."""
        try:
            key = load_pem_private_key((directory / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
            issued = _read_issued(directory)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{directory} holds no authority ({Path(error.filename).name} is missing): "
                f"loco certs init {directory} --host NAME makes one"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"the authority in {directory} is damaged: {error}") from error
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != certificate.public_key()
        ):
            raise ConfigError(
                f"{directory}/ca.key is not the ECDSA key of {directory}/ca.pem: restore both from "
                "one backup; another authority would mean new bundles for everyone"
            )
        return cls(directory, key, certificate, issued)

    # --- issuing --------------------------------------------------------------------------------

    def issue(
        self, name: str, *, role: str = "site", days: int = DAYS, hosts: Sequence[str] = ()
    ) -> Path:
        """Make a bundle and return its path; an earlier one of the name stays valid until it ends.

        `hosts` are the names and addresses of a coordinator; without them those of the last one.
        """
        with self._alone():
            return self._issue(name, role, days, hosts)

    def _issue(self, name: str, role: str, days: int, hosts: Sequence[str]) -> Path:
        hosts = tuple(hosts) or self._hosts_before(role)
        check_request(name, role=role, days=days, hosts=hosts)
        taken = {entry.role for entry in self.issued if entry.name == name} - {role}
        if taken:
            raise ConfigError(
                f"{name!r} as {role} is not possible: the name belongs to the {', '.join(taken)} "
                f"{name!r}; choose another name"
            )
        now = datetime.now(UTC)
        end = min(now + timedelta(days=days), self.certificate.not_valid_after_utc)
        if end <= now:
            raise ConfigError(
                f"the authority in {self.directory} has expired: make another one in another "
                "directory, and new bundles for everyone (docs/security.md, Rotation)"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(role, name, hosts, key, now, end)
        self.issued.append(
            Issued(
                role=role,
                name=name,
                serial=f"{certificate.serial_number:x}",
                not_after=end.timestamp(),
                hosts=hosts,
            )
        )
        self._save()  # first: what is not written down could never be revoked
        path = self.directory / f"{name}.pem"
        pems = (certificate.public_bytes(Encoding.PEM), self.certificate.public_bytes(Encoding.PEM))
        _write(path, _key_pem(key) + b"".join(pems), private=True)
        return path

    def renew(self, within_days: float) -> list[Path]:
        """Issue again what ends within so many days, or has ended; the bundles' paths.

        Each name keeps its role, a coordinator its hosts. Whoever's last certificate was revoked
        gets none.
        """
        with self._alone():
            last = {(entry.role, entry.name): entry for entry in self.issued}
            before = time.time() + within_days * 86_400
            return [
                self._issue(entry.name, entry.role, DAYS, entry.hosts)
                for entry in last.values()
                if entry.revoked_at is None and entry.not_after < before
            ]

    def _sign(
        self,
        role: str,
        name: str,
        hosts: Sequence[str],
        key: ec.EllipticCurvePrivateKey,
        begin: datetime,
        end: datetime,
    ) -> x509.Certificate:
        # A client's certificate cannot serve, nor the coordinator's act as a client.
        usage = ExtendedKeyUsageOID
        purpose = usage.SERVER_AUTH if role == COORDINATOR else usage.CLIENT_AUTH
        names = [x509.UniformResourceIdentifier(uri_of(role, name)), *map(_host, hosts)]
        own = self.certificate.subject
        return (
            _begin(_name(name), own, key.public_key(), self.key, begin, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def _hosts_before(self, role: str) -> tuple[str, ...]:
        if role != COORDINATOR:
            return ()
        return next((e.hosts for e in reversed(self.issued) if e.role == COORDINATOR), ())

    # --- revoking -------------------------------------------------------------------------------

    def revoke(self, name: str) -> list[str]:
        """Revoke every certificate of a name that is still valid, or the one of a serial number.

        Returns the serial numbers; the coordinator refuses them once it has the new revoked.pem.
        """
        with self._alone():
            return self._revoke(name)

    def _revoke(self, name: str) -> list[str]:
        now = time.time()
        of_name = [entry for entry in self.issued if name in (entry.name, entry.serial)]
        if not of_name:
            known = ", ".join(sorted({entry.name for entry in self.issued}))
            raise ConfigError(f"nothing was issued to {name!r} here; issued were {known or 'none'}")
        live = [entry for entry in of_name if entry.state(now) == "valid"]
        if not live:
            states = ", ".join(sorted({entry.state(now) for entry in of_name}))
            raise ConfigError(f"all certificates of {name!r} are {states} already")
        self.issued = [
            replace(entry, revoked_at=now) if entry in live else entry for entry in self.issued
        ]
        self._save()
        return [entry.serial for entry in live]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Others who change this directory wait, and what they have written down is taken up: a
        certificate that a ledger forgot could never be revoked."""
        with (self.directory / "ca.key").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.issued = _read_issued(self.directory)
            yield

    def _save(self) -> None:
        ledger = [asdict(entry) for entry in self.issued]
        _write(self.directory / "issued.json", json.dumps(ledger, indent=1).encode())
        _write(self.directory / "revoked.pem", self._revocation_list())

    def _revocation_list(self) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now)
            # It is replaced when something is revoked, not by the calendar.
            .next_update(self.certificate.not_valid_after_utc)
        )
        for entry in self.issued:
            if entry.revoked_at is None:
                continue
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(int(entry.serial, 16))
                .revocation_date(datetime.fromtimestamp(entry.revoked_at, UTC))
                .build()
            )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _read_issued(directory: Path) -> list[Issued]:
    ledger = json.loads((directory / "issued.json").read_text(encoding="utf-8"))
    return [Issued(**{**entry, "hosts": tuple(entry["hosts"])}) for entry in ledger]


def read_authority(path: Path) -> x509.Certificate:
    """The certificate in ca.pem; ConfigError if there is none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the authority {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate: give ca.pem of loco certs") from error


def read_revoked(path: Path, authority: x509.Certificate) -> frozenset[int]:
    """Serial numbers in a revocation list; ConfigError if the authority did not sign it."""
    try:
        revoked = x509.load_pem_x509_crl(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read the revocation list {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a revocation list: {error}") from error
    key = authority.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    if not revoked.is_signature_valid(key):
        raise ConfigError(
            f"the revocation list {path} was not signed by the coordinator's own authority: copy "
            "revoked.pem from the directory of loco certs"
        )
    return frozenset(entry.serial_number for entry in revoked)


def check_request(name: str, *, role: str, days: int, hosts: Sequence[str]) -> None:
    """ConfigError if no authority could issue this."""
    if role not in ROLES:
        raise ConfigError(f"role {role!r} is not known: use {', '.join(ROLES)}")
    if not NAME.fullmatch(name) or name in _RESERVED:
        raise ConfigError(
            f"the name {name!r} is not allowed: use 1 to 32 of a-z, 0-9, '-' and '_', starting "
            f"with a letter or digit, and not {' or '.join(_RESERVED)}"
        )
    if (role == COORDINATOR) != (name == COORDINATOR):
        raise ConfigError(
            f"{name!r} as {role} is not possible: the name {COORDINATOR!r} and the role "
            f"{COORDINATOR} belong together"
        )
    if not 1 <= days <= MAX_DAYS:
        raise ConfigError(f"--days {days} is not possible: use 1 to {MAX_DAYS}")
    if role == COORDINATOR and not hosts:
        raise ConfigError(
            "a coordinator's certificate needs the names and addresses at which sites reach it: "
            "--host NAME, as often as needed"
        )
    if role != COORDINATOR and hosts:
        raise ConfigError(f"--host is for a coordinator's certificate, not for a {role}'s")
    for host in hosts:
        _host(host)


# --- pieces of certificates -----------------------------------------------------------------------


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if not host or not all((c.isalnum() and c.isascii()) or c in "-.*" for c in host):
        raise ConfigError(
            f"--host {host!r} is not a name or an address: write it as sites do, without a port"
        )
    return x509.DNSName(host)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _begin(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - SKEW)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Whole or not at all: readers may look at any moment. ConfigError where it cannot be."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(aside, flags, 0o600 if private else 0o644), "wb") as file:
            file.write(data)
        aside.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
