"""Certificates and keys: what is in them, and who may read them."""

import os
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from deploy import keys
from deploy.keys import load_node_key, make_authority, make_node_key, make_server_certificate
from deploy.problem import DeployError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_authority(tmp_path / "keys")
    make_server_certificate(tmp_path / "keys", ["server.example.org", "10.1.2.3", "fd00::1"])
    make_node_key(tmp_path / "keys", "site-a")
    return tmp_path / "keys"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_the_owner_reads_private_keys_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_authority(tmp_path)
        make_server_certificate(tmp_path, ["localhost"])
        make_node_key(tmp_path, "site-a")
    finally:
        os.umask(before)
    assert {path.name: mode(path) for path in tmp_path.glob("*.key")} == {
        "ca.key": 0o600,
        "server.key": 0o600,
        "site-a.key": 0o600,
    }


def test_a_private_file_has_its_mode_before_it_has_content(tmp_path, monkeypatch):
    seen = []
    opened = os.fdopen

    def look(descriptor, *arguments):
        status = os.fstat(descriptor)
        seen.append((status.st_mode & 0o777, status.st_size))
        return opened(descriptor, *arguments)

    monkeypatch.setattr(keys.os, "fdopen", look)
    make_node_key(tmp_path, "site-a")
    assert seen[0] == (0o600, 0)


@pytest.mark.parametrize("name", ["site-a.key", "site-a.pub"])
def test_no_key_is_overwritten_and_no_half_pair_is_left(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(DeployError, match=f"{name} is there already"):
        make_node_key(tmp_path, "site-a")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_a_key_is_not_written_through_a_link(tmp_path):
    (tmp_path / "site-a.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeployError, match="is there already"):
        make_node_key(tmp_path, "site-a")
    assert not (tmp_path / "elsewhere").exists()


def test_the_certificate_is_for_the_hosts_and_the_machine_itself(folder):
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [
        "10.1.2.3",
        "fd00::1",
        "127.0.0.1",
    ]


def test_the_authority_vouches_for_the_server_by_the_strictest_rules(folder):
    # What Python 3.13 asks for by default.
    server, client = ssl.MemoryBIO(), ssl.MemoryBIO()
    checks = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    checks.load_verify_locations(folder / "ca.pem")
    checks.verify_flags |= ssl.VERIFY_X509_STRICT
    serves = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serves.load_cert_chain(folder / "server.pem", folder / "server.key")
    ends = [
        checks.wrap_bio(server, client, server_hostname="10.1.2.3"),
        serves.wrap_bio(client, server, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ends[0].getpeercert()["subject"] == ((("commonName", "isoloco_flwr server"),),)


def test_a_server_certificate_signs_no_others(folder):
    certificate = x509.load_pem_x509_certificate((folder / "server.pem").read_bytes())
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (constraints.ca, usage.key_cert_sign) == (False, False)


def test_a_certificate_ends_after_its_days(tmp_path):
    now = datetime.now(UTC)
    make_authority(tmp_path)
    path = make_server_certificate(tmp_path, ["localhost"], days=30, now=now)
    end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    assert end == (now + timedelta(days=30)).replace(microsecond=0)


def test_node_keys_are_of_the_kind_that_flower_takes(folder):
    private = load_node_key(folder / "site-a.key")
    public = load_ssh_public_key((folder / "site-a.pub").read_bytes())
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


def test_a_key_that_others_may_read_is_refused(folder):
    (folder / "site-a.key").chmod(0o640)
    with pytest.raises(DeployError, match="has mode 640"):
        load_node_key(folder / "site-a.key")


@pytest.mark.parametrize("host", ["http://server", "a b", "", "server:9092"])
def test_hosts_are_names_or_addresses(tmp_path, host):
    make_authority(tmp_path)
    with pytest.raises(DeployError, match="allowed is a name"):
        make_server_certificate(tmp_path, [host])
    assert not (tmp_path / "server.key").exists()


def test_the_commands_print_no_key_and_renew_with_the_same_authority(tmp_path):
    def deploy(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy", *arguments, "--keys", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    printed = ""
    for arguments in (["certificates", "--host", "localhost"], ["keys", "site-a"]):
        done = deploy(*arguments)
        assert done.returncode == 0, done.stderr
        printed += done.stdout + done.stderr
    again = deploy("certificates", "--host", "localhost")
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "server.key is there already" in again.stderr

    authority = (tmp_path / "ca.pem").read_bytes()
    for name in ("server.pem", "server.key"):
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    assert deploy("certificates", "--host", "localhost").returncode == 0
    assert (tmp_path / "ca.pem").read_bytes() == authority
    secrets = [line for path in tmp_path.glob("*.key") for line in path.read_text().splitlines()]
    assert len(secrets) > 10
    assert not [line for line in secrets if len(line) > 20 and line in printed + again.stderr]
