"""The operator's certificates: a certificate authority, its leaf certificate, and their renewal.

One Secret holds them, so that every leader serves the same certificate. Pods receive the PEM of the
authorities (`bundle`) only when they are created, so an authority is in the bundle long before it
signs a leaf. `renewed` is a pure function from Secret data to Secret data; the caller stores its
result with compare-and-swap, and uses what another leader has stored in the meantime.

No pod mounts that Secret: the kubelet of a pod's node may read every Secret that the pod mounts,
with all of its keys. The webhook has a separate Secret (`renewed_webhook`), without the authority's
key, with a leaf that is not valid for the gateway.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "BUNDLE",
    "LEAF",
    "LEAF_KEY",
    "SECRET_NAME",
    "WEBHOOK_SECRET_NAME",
    "Certificates",
    "certificates_of",
    "renewed",
    "renewed_webhook",
]

SECRET_NAME: Final = "flyer-certificates"  # noqa: S105  a name
WEBHOOK_SECRET_NAME: Final = "flyer-webhook-certificate"  # noqa: S105  a name

AUTHORITY_LIFE: Final = timedelta(days=3650)
# The next authority enters the bundle a year before it signs; no pod runs that long.
SUCCESSOR_BEFORE: Final = timedelta(days=1825)
HANDOVER_BEFORE: Final = timedelta(days=1460)
LEAF_LIFE: Final = timedelta(days=90)
LEAF_BEFORE: Final = timedelta(days=30)
CLOCKS_DIFFER: Final = timedelta(minutes=5)

# Keys of the Secret; `tls.*` and `ca.crt` as in Secrets of the type kubernetes.io/tls.
LEAF, LEAF_KEY, BUNDLE = "tls.crt", "tls.key", "ca.crt"
AUTHORITY, AUTHORITY_KEY = "authority.crt", "authority.key"
SUCCESSOR, SUCCESSOR_KEY = "successor.crt", "successor.key"
SECRET: Final = "collectives.secret"  # noqa: S105  a name
SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts."""

    bundle: str
    """Trusted authorities: the current one and its successor."""
    certificate: str
    key: str
    secret: str = ""
    """Seed from which the keys of jobs' collectives are derived; only the gateway has it."""

    def __repr__(self) -> str:
        """Without the key."""
        return "Certificates(…)"


def certificates_of(data: Mapping[str, bytes]) -> Certificates:
    """The certificates in the decoded data of the Secret."""
    bundle, leaf, key = (data[name].decode() for name in (BUNDLE, LEAF, LEAF_KEY))
    return Certificates(bundle, leaf, key, data.get(SECRET, b"").decode())


def renewed(
    data: Mapping[str, bytes] | None, names: Sequence[str], now: datetime
) -> dict[str, bytes]:
    """The renewed data; equal to `data` if nothing is due.

    `names`: DNS names and IP addresses of the operator. Unreadable data is replaced: pods that run
    then have to be restarted, but new ones can connect.
    """
    secret_data = dict(data or {})
    secret = secret_data.get(SECRET, b"")
    authority = _pair(secret_data, AUTHORITY, AUTHORITY_KEY, now)
    if authority is None:
        secret_data = {}
        authority = _new_authority(secret_data, AUTHORITY, AUTHORITY_KEY, now)
    successor = _pair(secret_data, SUCCESSOR, SUCCESSOR_KEY, now)
    remaining = authority[0].not_valid_after_utc - now
    if successor is None and remaining < SUCCESSOR_BEFORE:
        successor = _new_authority(secret_data, SUCCESSOR, SUCCESSOR_KEY, now)
        secret_data[BUNDLE] = secret_data[AUTHORITY] + secret_data[SUCCESSOR]
    elif successor is not None and remaining < HANDOVER_BEFORE:
        old = secret_data[AUTHORITY]
        secret_data[AUTHORITY], secret_data[AUTHORITY_KEY] = (
            secret_data.pop(SUCCESSOR),
            secret_data.pop(SUCCESSOR_KEY),
        )
        secret_data[BUNDLE] = secret_data[AUTHORITY] + old
        authority = successor
        secret_data.pop(LEAF, None)
    if not _is_bundle(secret_data.get(BUNDLE, b""), secret_data[AUTHORITY]):
        secret_data[BUNDLE] = secret_data[AUTHORITY] + secret_data.get(SUCCESSOR, b"")
    if not _leaf_is_good(secret_data, authority[0], names, now):
        _new_leaf(secret_data, authority, names, now)
    secret_data[SECRET] = secret if _is_secret(secret) else secrets.token_hex(SECRET_BYTES).encode()
    return secret_data


def renewed_webhook(
    authorities: Mapping[str, bytes],
    data: Mapping[str, bytes],
    names: Sequence[str],
    now: datetime,
) -> dict[str, bytes]:
    """The renewed data of the webhook's Secret; equal to `data` if nothing is due.

    `authorities`: the result of `renewed`.
    """
    authority = _pair(authorities, AUTHORITY, AUTHORITY_KEY, now)
    if authority is None:
        raise ValueError("the authority is missing or has ended: renew it first")
    secret_data = {name: data[name] for name in (LEAF, LEAF_KEY) if name in data}
    secret_data[BUNDLE] = authorities[BUNDLE]
    if not _leaf_is_good(secret_data, authority[0], names, now):
        _new_leaf(secret_data, authority, names, now)
    return secret_data


def _is_secret(value: bytes) -> bool:
    try:
        return len(bytes.fromhex(value.decode("ascii"))) >= SECRET_BYTES
    except ValueError:
        return False


_Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _pair(data: Mapping[str, bytes], name: str, key_name: str, now: datetime) -> _Pair | None:
    """A certificate and its key, if both exist, match and are still valid."""
    try:
        certificate = x509.load_pem_x509_certificate(data[name])
        key = serialization.load_pem_private_key(data[key_name], None)
    except (KeyError, ValueError, TypeError, binascii.Error):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return None
    matches = certificate.public_key() == key.public_key()
    return (certificate, key) if matches and certificate.not_valid_after_utc > now else None


def _is_bundle(bundle: bytes, authority: bytes) -> bool:
    try:
        return bool(x509.load_pem_x509_certificates(bundle)) and authority in bundle
    except ValueError:
        return False


def _leaf_is_good(
    data: Mapping[str, bytes], authority: x509.Certificate, names: Sequence[str], now: datetime
) -> bool:
    pair = _pair(data, LEAF, LEAF_KEY, now)
    if pair is None or pair[0].not_valid_after_utc - now < LEAF_BEFORE:
        return False
    try:
        pair[0].verify_directly_issued_by(authority)
        alternative_names = (
            pair[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
    except Exception:  # noqa: BLE001  whatever is wrong with it: it is replaced
        return False
    return set(alternative_names) == set(_general_names(names))


def _new_authority(data: dict[str, bytes], name: str, key_name: str, now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    label = base64.b32encode(serial.to_bytes(20, "big")).decode()[:8].lower()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fire-flyer {label}")])
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    data[name], data[key_name] = _pem(certificate), _key_pem(key)
    return certificate, key


def _new_leaf(
    data: dict[str, bytes], authority: _Pair, names: Sequence[str], now: datetime
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer, issuer_key = authority
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fire-flyer operator")])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + LEAF_LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(_general_names(names)), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    data[LEAF], data[LEAF_KEY] = _pem(certificate), _key_pem(key)


def _general_names(names: Sequence[str]) -> list[x509.GeneralName]:
    general_names: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        try:
            general_names.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            general_names.append(x509.DNSName(name))
    return general_names


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
