"""Who a certificate stands for: the role and name in its URI, `urn:loco:ROLE:NAME`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509

from loco.errors import ConfigError

COORDINATOR = "coordinator"
ROLES = ("site", "operator", "reader", COORDINATOR)
"""site: takes part as itself; operator: control verbs; reader: status and metrics."""
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")

_URI = re.compile(rf"urn:loco:({'|'.join(ROLES)}):({NAME.pattern})")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What an authenticated peer is. Times are Unix seconds."""

    role: str
    name: str
    serial: int
    not_before: float
    not_after: float

    def __str__(self) -> str:
        return self.role if self.role == COORDINATOR else f"{self.role} {self.name!r}"

    @property
    def validity(self) -> str:
        """In words, UTC."""
        return f"{when(self.not_before)} to {when(self.not_after)}"


def when(seconds: float) -> str:
    """Unix seconds as people read them, UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def uri_of(role: str, name: str) -> str:
    """The URI that `identity_of` reads."""
    return f"urn:loco:{role}:{name}"


def identity_of(certificate: x509.Certificate) -> Identity:
    """Role and name from the subject alternative names; ConfigError if there is not exactly one."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    found = [match for match in map(_URI.fullmatch, uris) if match]
    if len(found) != 1:
        raise ConfigError(
            f"the certificate {certificate.subject.rfc4514_string()!r} names "
            f"{', '.join(uris) or 'no URI'} where one urn:loco:ROLE:NAME is needed: "
            "make it with loco certs issue"
        )
    role, name = found[0].groups()
    return Identity(
        role=role,
        name=name,
        serial=certificate.serial_number,
        not_before=certificate.not_valid_before_utc.timestamp(),
        not_after=certificate.not_valid_after_utc.timestamp(),
    )
