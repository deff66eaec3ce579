"""Keys, certificates and kubeconfig files of one cluster: one authority, valid for ten days."""

from __future__ import annotations

import base64
import datetime as dt
import json
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Authority", "Identity", "write_kubeconfig", "write_service_account_keys"]

VALID = dt.timedelta(days=10)
SKEW = dt.timedelta(minutes=5)


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key."""

    certificate: Path
    key: Path


class Authority:
    """The cluster's certificate authority; made in `folder`, or found there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificate = folder / "ca.crt"
        key_file = folder / "ca.key"
        if not key_file.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            key = ec.generate_private_key(ec.SECP256R1())
            name = _name("fireflyer-e2e-ca", ())
            certificate = (
                _builder(name, name, key.public_key())
                .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
                .sign(key, hashes.SHA256())
            )
            self.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
            _write_key(key_file, key)
        loaded = serialization.load_pem_private_key(key_file.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self._key = loaded
        self._issuer = x509.load_pem_x509_certificate(self.certificate.read_bytes()).subject

    def issue(
        self, file: str, common_name: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()
    ) -> Identity:
        """A certificate for a client (name and groups) that may serve as these hosts too."""
        identity = Identity(self._folder / f"{file}.crt", self._folder / f"{file}.key")
        key = ec.generate_private_key(ec.SECP256R1())
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(_name(common_name, groups), self._issuer, key.public_key())
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        identity.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(identity.key, key)
        return identity


def write_service_account_keys(folder: Path) -> tuple[Path, Path]:
    """The pair that signs service-account tokens: (private, public)."""
    private, public = folder / "service-account.key", folder / "service-account.pub"
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(private, key)
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def write_kubeconfig(path: Path, server: str, authority: Path, identity: Identity) -> None:
    """A self-contained kubeconfig (JSON, which is also YAML)."""
    name = "fireflyer-e2e"

    def data(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": name,
                "cluster": {"server": server, "certificate-authority-data": data(authority)},
            }
        ],
        "users": [
            {
                "name": name,
                "user": {
                    "client-certificate-data": data(identity.certificate),
                    "client-key-data": data(identity.key),
                },
            }
        ],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1))


def _name(common_name: str, groups: Sequence[str]) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return x509.CertificateBuilder(
        issuer, subject, public, x509.random_serial_number(), now - SKEW, now + VALID
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
