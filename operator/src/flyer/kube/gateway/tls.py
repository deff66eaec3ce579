"""Server-side TLS context, whose certificate can be replaced while it serves."""

from __future__ import annotations

import os
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flyer.kube.gateway.certificates import Certificates

__all__ = ["load_certificates", "server_context", "trust_clients"]


def server_context() -> ssl.SSLContext:
    """TLS 1.3 only: both ends are part of Fire-Flyer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def load_certificates(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Use it from the next handshake on. The ssl module loads only files: this one is in memory."""
    descriptor = os.memfd_create("certificates", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, (certificates.certificate + certificates.key).encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def trust_clients(context: ssl.SSLContext, authority: str) -> None:
    """Require a client certificate that this authority (PEM) signed."""
    context.load_verify_locations(cadata=authority)
    context.verify_mode = ssl.CERT_REQUIRED
