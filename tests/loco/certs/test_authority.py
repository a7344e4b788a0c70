"""`loco certs` through its own command line: what it makes, and every misuse in one clear line.

What it makes is compared with the X.509 reader of the cryptography package and with OpenSSL (by way
of Python's ssl), which has its own idea of a valid chain. Run alone: pytest tests/loco/certs
"""

from __future__ import annotations

import json
import os
import ssl
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from loco import commands
from loco.certs.authority import Authority, read_revoked
from loco.certs.bundle import read_bundle
from loco.cli import run
from loco.errors import ConfigError, RefusedError

DAY = 86_400
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def certs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs `loco certs ...` in an empty directory: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer(pretty_exceptions_enable=False)
    commands.register(app)

    def certs(*arguments: str) -> tuple[int, str, str]:
        code = run(app, ["certs", *arguments])
        told = capsys.readouterr()
        return code, told.out, told.err

    return certs


def test_one_command_makes_authority_coordinator_operator_and_sites(certs: Run) -> None:
    code, said, _ = certs("init", "certs", "--host", "10.0.0.1", "--host", "c.org", "--site", "a")
    assert code == 0
    assert sorted(os.listdir("certs")) == [
        "a.pem", "ca.key", "ca.pem", "coordinator.pem", "issued.json", "ops.pem", "revoked.pem",
    ]  # fmt: skip
    assert "certs/a.pem" in said
    for name, role in (("a", "site"), ("ops", "operator"), ("coordinator", "coordinator")):
        identity = read_bundle(Path(f"certs/{name}.pem")).identity
        assert (identity.role, identity.name) == (role, name)
        assert 29 * DAY < identity.not_after - time.time() < 31 * DAY
    names = read_bundle(Path("certs/coordinator.pem")).certificate.extensions
    alternative = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternative.get_values_for_type(x509.DNSName) == ["c.org"]
    assert [str(a) for a in alternative.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]


def test_private_files_are_private_and_keys_are_p256(certs: Run) -> None:
    certs("init", "certs", "--site", "a")
    for name in ("ca.key", "a.pem", "ops.pem", "coordinator.pem"):
        assert stat.S_IMODE(Path("certs", name).stat().st_mode) == 0o600
    assert isinstance(read_bundle(Path("certs/a.pem")).key.curve, ec.SECP256R1)


def test_openssl_loads_a_bundle_as_it_is(certs: Run) -> None:
    certs("init", "certs", "--site", "a")
    context = ssl.create_default_context(cafile="certs/ca.pem")
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain("certs/a.pem")


def test_what_was_issued_is_listed_with_its_end_and_state(certs: Run) -> None:
    certs("init", "certs", "--site", "a")
    certs("issue", "b", "--days", "3")
    certs("revoke", "a")
    listed = {e["name"]: e for e in json.loads(certs("list", "--json")[1])}
    assert {name: e["state"] for name, e in listed.items()} == {
        "coordinator": "valid", "ops": "valid", "a": "revoked", "b": "valid",
    }  # fmt: skip
    assert 2.9 * DAY < listed["b"]["not_after"] - time.time() < 3 * DAY
    lines = certs("list")[1].splitlines()
    assert len(lines) == 4
    assert "3 days left" in lines[3]
    assert "revoked" in lines[2]


def test_revoking_a_name_revokes_all_its_certificates_and_a_serial_only_one(certs: Run) -> None:
    certs("init", "certs", "--site", "a")
    first = read_bundle(Path("certs/a.pem"))
    certs("issue", "a")
    second = read_bundle(Path("certs/a.pem"))
    certs("issue", "a")
    third = read_bundle(Path("certs/a.pem"))
    revoked = Path("certs/revoked.pem")
    assert certs("revoke", f"{second.identity.serial:x}")[0] == 0
    assert read_revoked(revoked, first.authority) == {second.identity.serial}
    assert certs("revoke", "a")[0] == 0
    serials = {b.identity.serial for b in (first, second, third)}
    assert read_revoked(revoked, first.authority) == serials


def test_what_two_issue_at_once_can_both_be_revoked(certs: Run) -> None:
    """Each has read the ledger before the other writes it."""
    certs("init", "certs")
    first, second = Authority.open(Path("certs")), Authority.open(Path("certs"))
    first.issue("a")
    second.issue("b")
    assert certs("revoke", "a")[0] == 0
    assert certs("revoke", "b")[0] == 0


def test_no_bundle_is_made_that_cannot_be_written_down(certs: Run) -> None:
    certs("init", "certs")
    authority = Authority.open(Path("certs"))
    Path("certs/.issued.json.partial").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        authority.issue("a")
    assert not Path("certs/a.pem").exists()


def test_a_coordinator_is_renewed_for_the_names_it_has(certs: Run) -> None:
    certs("init", "certs", "--host", "c.org")
    before = read_bundle(Path("certs/coordinator.pem"))
    assert certs("issue", "coordinator", "--role", "coordinator")[0] == 0
    after = read_bundle(Path("certs/coordinator.pem"))
    assert after.identity.serial != before.identity.serial
    names = [
        b.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for b in (before, after)
    ]
    assert names[0] == names[1]


def test_a_certificate_never_outlives_its_authority(certs: Run) -> None:
    certs("init", "certs", "--days", "366")
    bundle = read_bundle(Path("certs/coordinator.pem"))
    assert bundle.certificate.not_valid_after_utc <= bundle.authority.not_valid_after_utc


MISUSES = [
    (("init", "certs"), ("holds an authority already",)),
    (("init", "new", "--host", "a/b"), ("'a/b'", "without a port")),
    (("init", "new", "--host", ""), ("''",)),
    (("init", "new", "--site", "Paris"), ("'Paris'", "a-z")),
    (("init", "new", "--days", "0"), ("--days 0", "1 to 366")),
    (("issue", "a", "--dir", "none"), ("none holds no authority", "loco certs init")),
    (("issue", "a", "--role", "king"), ("'king'", "site, operator, reader, coordinator")),
    (("issue", "a", "--role", "reader"), ("'a' as reader", "belongs to the site")),
    (("issue", "coordinator"), ("'coordinator' as site",)),
    (("issue", "b", "--role", "coordinator"), ("belong together",)),
    (("issue", "ca"), ("'ca'", "not ca or revoked")),
    (("issue", "x" * 33), ("1 to 32",)),
    (("issue", "../x"), ("'../x'",)),
    (("issue", "b", "--host", "c.org"), ("--host is for a coordinator's",)),
    (("issue", "b", "--days", "9999"), ("--days 9999",)),
    (("revoke", "nobody"), ("'nobody'", "a, coordinator, ops")),
    (("list", "--dir", "none"), ("none holds no authority",)),
]


@pytest.mark.parametrize(("arguments", "says"), MISUSES, ids=[" ".join(m[0])[:30] for m in MISUSES])
def test_a_misuse_is_one_clear_line_and_changes_nothing(
    certs: Run, arguments: tuple[str, ...], says: tuple[str, ...]
) -> None:
    certs("init", "certs", "--site", "a")
    before = {path: path.read_bytes() for path in Path("certs").iterdir()}
    code, _, told = certs(*arguments)
    assert code == 2
    assert told.startswith("loco: ")
    assert told.count("\n") == 1
    for text in says:
        assert text in told
    assert {path: path.read_bytes() for path in Path("certs").iterdir()} == before
    assert not Path("new").exists()


def test_revoking_twice_says_so(certs: Run) -> None:
    certs("init", "certs", "--site", "a")
    certs("revoke", "a")
    code, _, told = certs("revoke", "a")
    assert (code, "revoked already" in told) == (2, True)


def test_a_damaged_authority_is_named(certs: Run) -> None:
    certs("init", "certs")
    Path("certs/issued.json").write_text("[{]")
    assert "the authority in certs is damaged" in certs("issue", "a")[2]


def test_a_key_that_is_not_the_authoritys_is_named(certs: Run) -> None:
    """Of another authority, or of another kind: what it signs nobody would accept."""
    certs("init", "certs")
    certs("init", "others")
    for key in (Path("others/ca.key").read_bytes(), pem(rsa.generate_private_key(65537, 2048))):
        Path("certs/ca.key").write_bytes(key)
        code, _, told = certs("issue", "a")
        assert (code, "certs/ca.key is not the ECDSA key of certs/ca.pem" in told) == (2, True)


def pem(key: rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


# --- bundles --------------------------------------------------------------------------------------


def part(path: str, index: int) -> str:
    parts = Path(path).read_text().split("-----BEGIN")[1:]
    return f"-----BEGIN{parts[index]}"


def spoiled(*parts: str, mode: int = 0o600) -> Path:
    path = Path("spoiled.pem")
    path.write_text("".join(parts))
    path.chmod(mode)
    return path


def test_every_bad_bundle_is_refused_by_what_is_wrong(certs: Run) -> None:
    certs("init", "certs", "--site", "a", "--site", "b")
    certs("init", "others", "--site", "a")
    a, b, others = "certs/a.pem", "certs/b.pem", "others/a.pem"
    key, certificate, authority = (part(a, i) for i in range(3))
    rsa_key = pem(rsa.generate_private_key(65537, 2048)).decode()
    for parts, says in (
        ((), "is not a bundle"),
        (("rubbish",), "is not a bundle"),
        ((certificate, authority), "is not a bundle"),
        ((key, certificate), "is not a bundle"),
        ((key, part(b, 1), authority), "is not that of its certificate"),
        ((key, certificate, part(others, 2)), "was not issued by the authority"),
        ((rsa_key, certificate, authority), "is not ECDSA"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_bundle(spoiled(*parts))
    with pytest.raises(ConfigError, match="everyone may read it: chmod 600"):
        read_bundle(spoiled(key, certificate, authority, mode=0o644))
    with pytest.raises(ConfigError, match=r"cannot read the bundle none\.pem"):
        read_bundle(Path("none.pem"))


def test_a_bundle_outside_its_time_says_by_which_clock(
    certs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs("init", "certs", "--site", "a")
    bundle = read_bundle(Path("certs/a.pem"))
    bundle.check_time()
    for moment, says in (
        (bundle.identity.not_after, "has expired"),
        (bundle.identity.not_before - 1, "is not valid yet"),
    ):
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        with pytest.raises(RefusedError, match=f"{says}.*this machine's clock says"):
            bundle.check_time()


def test_a_revocation_list_of_another_authority_is_refused(certs: Run) -> None:
    certs("init", "certs")
    certs("init", "others")
    own = read_bundle(Path("certs/coordinator.pem")).authority
    with pytest.raises(ConfigError, match="was not signed by the coordinator's own authority"):
        read_revoked(Path("others/revoked.pem"), own)
    Path("certs/revoked.pem").write_text("rubbish")
    with pytest.raises(ConfigError, match="is not a revocation list"):
        read_revoked(Path("certs/revoked.pem"), own)


def test_what_ends_soon_is_renewed_and_nothing_else(certs: Run) -> None:
    certs("init", "certs", "--host", "c.org", "--site", "a", "--site", "gone")
    certs("issue", "soon", "--days", "9")
    certs("issue", "soon-too", "--role", "reader", "--days", "3")
    certs("revoke", "gone")
    before = {
        p.name: p.read_bytes() for p in Path("certs").glob("*.pem") if p.name != "revoked.pem"
    }
    code, said, _ = certs("renew", "--within-days", "10")
    assert code == 0
    assert said.split("\n")[:-1] == ["renewed certs/soon.pem", "renewed certs/soon-too.pem"]
    changed = {n for n, data in before.items() if (Path("certs") / n).read_bytes() != data}
    assert changed == {"soon.pem", "soon-too.pem"}
    identity = read_bundle(Path("certs/soon-too.pem")).identity
    assert (identity.role, identity.name) == ("reader", "soon-too")
    assert identity.not_after - time.time() > 29 * DAY
    assert certs("renew")[1] == ""  # done already
    code, said, _ = certs("renew", "--within-days", "31")
    assert {line.split("/")[-1] for line in said.split()[1::2]} == {
        "coordinator.pem", "ops.pem", "a.pem", "soon.pem", "soon-too.pem",
    }  # fmt: skip
    names = read_bundle(Path("certs/coordinator.pem")).certificate.extensions
    hosts = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["c.org"]


def test_a_site_named_as_the_operator_leaves_nothing_half_made(certs: Run) -> None:
    code, _, said = certs("init", "certs", "--host", "c.org", "--site", "a", "--site", "ops")
    assert (code, Path("certs").exists()) == (2, False)
    assert "--site ops" in said
    assert "operator" in said
    assert certs("init", "certs", "--host", "c.org", "--site", "a")[0] == 0
