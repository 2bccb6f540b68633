"""Certificates for the server and keys for the sites, in files that only their owner reads."""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from deploy.problem import DeployError

__all__ = ["load_node_key", "make_authority", "make_node_key", "make_server_certificate"]

AUTHORITY_DAYS = 3650
"""Days that a certificate authority is valid."""

_CLOCKS = timedelta(hours=1)
"""A certificate is valid this long before it was made, for machines whose clocks are behind."""

_LOCAL_HOSTS = ("localhost", "127.0.0.1")
"""What the server's own processes call it."""


def make_authority(folder: Path, *, now: datetime | None = None) -> Path:
    """Make a certificate authority, `ca.pem` and `ca.key`, and return the certificate's path.

    Parameters
    ----------
    folder : Path
        Where both go, made if missing.
    now : datetime, optional
        When it begins to be valid; by default this moment.

    Raises
    ------
    DeployError
        If one of the files is there already.
    """
    start = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isoloco_flwr authority")])
    certificate = (
        _builder(name, name, key, start, timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    _write_pair(folder, "ca.key", _pem(key), "ca.pem", certificate.public_bytes(Encoding.PEM))
    return folder / "ca.pem"


def make_server_certificate(
    folder: Path, hosts: Sequence[str], *, days: float = 365, now: datetime | None = None
) -> Path:
    """Make `server.pem` and `server.key`, signed by the authority of the same folder.

    Parameters
    ----------
    folder : Path
        Holds `ca.pem` and `ca.key`.
    hosts : Sequence[str]
        Names and addresses under which sites reach the server; those of the machine itself are
        added.
    days : float
        How long it is valid.
    now : datetime, optional
        When it begins to be valid; by default this moment.

    Returns
    -------
    Path
        Of the certificate.

    Raises
    ------
    DeployError
        If one of the files is there already, or a host is no name or address.
    """
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    signer = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise DeployError(f"{folder / 'ca.key'}: allowed is the elliptic-curve key made with it")
    start = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "isoloco_flwr server")])
    names = [_host(host) for host in dict.fromkeys([*hosts, *_LOCAL_HOSTS])]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _builder(name, authority.subject, key, start, timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA384())
    )
    public = certificate.public_bytes(Encoding.PEM)
    _write_pair(folder, "server.key", _pem(key), "server.pem", public)
    return folder / "server.pem"


def make_node_key(folder: Path, name: str) -> Path:
    """Make a site's key, `NAME.key` and `NAME.pub`, and return the public one's path.

    The key is on the curve P-384, in the form of OpenSSH, as Flower takes it.

    Raises
    ------
    DeployError
        If one of the files is there already.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write_pair(folder, f"{name}.key", private, f"{name}.pub", public + b"\n")
    return folder / f"{name}.pub"


def load_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key.

    Raises
    ------
    DeployError
        If it is not there, is no such key, or others than its owner may read it.
    """
    try:
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise DeployError(
                f"key {path} has mode {mode:03o}, others may have read it: allowed is 600 "
                "(better make a new key)"
            )
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise DeployError(f"key {path} cannot be read: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise DeployError(f"key {path}: allowed is a key that `keys` made") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeployError(f"key {path}: allowed is an ECDSA key, as `keys` makes it")
    return key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    start: datetime,
    valid: timedelta,
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _CLOCKS)
        .not_valid_after(start + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    if not host.isascii() or not all(label.replace("-", "").isalnum() for label in labels):
        raise DeployError(f"host {host!r}: allowed is a name (server.example.org) or an address")
    return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_pair(
    folder: Path, private_name: str, private: bytes, public_name: str, public: bytes
) -> None:
    """Write a private file and its public one, or neither."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write_new(folder / private_name, private, 0o600)
    try:
        _write_new(folder / public_name, public, 0o644)
    except BaseException:
        (folder / private_name).unlink()
        raise


def _write_new(path: Path, content: bytes, mode: int) -> None:
    # The file has its mode from the start: there is no moment in which others can read it.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise DeployError(
            f"{path} is there already: nothing is overwritten, move it away first"
        ) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
