"""Credentials of the etcd members of one machine, new at every start of the supervisor.

An authority that exists only during the call signs one certificate, with which members accept
clients and each other. So every process that can read the key has access: those of the supervisor's
user. Nothing has to be renewed: the members and the services end with the supervisor.
"""

from __future__ import annotations

import datetime as dt
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING

from threefs.cluster import write_atomically
from threefs.errors import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import CertificateBuilder

__all__ = ["check_installed", "write_credentials"]

VALID = dt.timedelta(days=3650)
"""Longer than a supervisor runs."""
SKEW = dt.timedelta(days=1)


def check_installed() -> None:
    """Refuse a missing optional package with the command that installs it."""
    if find_spec("cryptography") is None:
        raise Unavailable(
            "the package `cryptography` is missing; the certificates of etcd members need it: "
            "`pip install 'threefs[etcd]'`"
        )


def write_credentials(folder: Path, address: str) -> tuple[Path, Path, Path]:
    """Write the files of the authority, of the certificate for an address, and of its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    usage = x509.oid.ExtendedKeyUsageOID
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = _certificate("authority", authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    member = (
        _certificate("member", key)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))]), False)
        .add_extension(x509.ExtendedKeyUsage([usage.SERVER_AUTH, usage.CLIENT_AUTH]), False)
    )
    pem = serialization.Encoding.PEM
    texts = [
        builder.sign(authority, hashes.SHA256()).public_bytes(pem) for builder in (root, member)
    ]
    texts.append(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    files = (folder / "ca.crt", folder / "member.crt", folder / "member.key")
    for path, text in zip(files, texts, strict=True):
        write_atomically(path, text.decode(), mode=0o600)
    return files


def _certificate(name: str, key: ec.EllipticCurvePrivateKey) -> CertificateBuilder:
    from cryptography import x509

    def named(common_name: str) -> x509.Name:
        text = f"threefs serve {common_name}"
        return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named("authority"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + VALID)
    )
