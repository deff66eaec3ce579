"""Client of the ticket issuer, for node plugins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from threefs.cluster import read_addresses
from threefs.csi.errors import (
    CsiError,
    FailedPrecondition,
    InvalidArgument,
    Missing,
    NoPermission,
    Unreachable,
)
from threefs.csi.tickets.key_issuer import Issued
from threefs.csi.tickets.review import AUDIENCE, PODS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from threefs.csi.tickets.review import PodName
    from threefs.csi.volumes.volume_id import VolumeId

__all__ = ["METHOD", "SERVICE", "TEXT_BYTES_MAX", "TOKENS", "IssuerClient"]

SERVICE = "fireflyer.threefs.Issuer"
METHOD = "Issue"
TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
"""Key of the tokens of `tokenRequests` in the context of a publish request."""
TEXT_BYTES_MAX = 64 << 10
CALL_SECONDS = 12.0
"""Longer than the issuer's requests usually take; the kubelet waits for two minutes."""

ERRORS: dict[grpc.StatusCode, type[CsiError]] = {
    grpc.StatusCode.PERMISSION_DENIED: NoPermission,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: Missing,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
}


@dataclass(frozen=True, slots=True)
class IssuerClient:
    """Implements `key_issuer.Issuer`, with a connection for each call."""

    address: str
    ca_file: Path
    token_file: Path

    @property
    def needs_pod(self) -> bool:
        """See `Issuer`."""
        return True

    def issue(self, volume: VolumeId, context: Mapping[str, str]) -> Issued:
        """See `Issuer`."""
        return self._call({"volume": str(volume), "pod_token": _pod_token(context)})

    def renew(self, volume: VolumeId, ticket: str, pods: Sequence[PodName]) -> Issued:
        """See `Issuer`."""
        names = [[pod.namespace, pod.name, pod.uid] for pod in pods[:PODS_MAX]]
        return self._call({"volume": str(volume), "ticket": ticket, "pods": names})

    def _call(self, request: dict[str, Any]) -> Issued:
        try:
            ca = self.ca_file.read_bytes()
            request["node_token"] = self.token_file.read_text().strip()
        except OSError as error:
            raise Unreachable(f"credentials of the node plugin: {error}") from error
        with grpc.secure_channel(self.address, grpc.ssl_channel_credentials(ca)) as channel:
            call = channel.unary_unary(f"/{SERVICE}/{METHOD}", None, None)
            try:
                reply = call(json.dumps(request).encode(), timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                status: Any = error
                kind = ERRORS.get(status.code(), Unreachable)
                raise kind(f"issuer `{self.address}`: {status.details()}") from error
        return _issued(reply)


def _pod_token(context: Mapping[str, str]) -> str:
    """Return the pod's token for the issuer from the publish request."""
    try:
        tokens: Any = json.loads(context.get(TOKENS, "{}"))
        token = tokens[AUDIENCE]["token"]
    except (ValueError, KeyError, TypeError):
        token = ""
    if not isinstance(token, str) or not token:
        raise FailedPrecondition(
            f"the request has no service account token for audience `{AUDIENCE}`; the CSIDriver "
            "object needs tokenRequests with this audience: reinstall the chart"
        )
    return token


def _issued(reply: bytes) -> Issued:
    try:
        data: Any = json.loads(reply)
        mgmtd = tuple(str(address) for address in data["mgmtd"])
        meta, tls = _checked(read_addresses(data["meta"])), bool(data.get("tls", False))
        return Issued(str(data["ticket"]), int(data["expires"]), mgmtd, meta, tls)
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable(
            "cannot parse the issuer's reply; do both run the same version?"
        ) from error


def _checked(addresses: tuple[str, ...]) -> tuple[str, ...]:
    if not addresses:
        raise ValueError("the reply has no address of a metadata service")
    return addresses
