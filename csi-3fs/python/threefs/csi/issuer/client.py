"""The node plugin's side of the issuer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from threefs.csi.errors import (
    CsiError,
    FailedPrecondition,
    InvalidArgument,
    Missing,
    NoPermission,
    Unreachable,
)
from threefs.csi.issuer.review import AUDIENCE, PODS_MAX
from threefs.csi.tickets import Issued

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from threefs.csi.issuer.review import PodName
    from threefs.csi.volume_id import VolumeId

__all__ = ["METHOD", "SERVICE", "TEXT_BYTES_MAX", "TOKENS", "IssuerClient"]

SERVICE = "fireflyer.threefs.Issuer"
METHOD = "Issue"
TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
"""Where the kubelet puts the tokens of `tokenRequests` in a publish request."""
TEXT_BYTES_MAX = 64 << 10
CALL_SECONDS = 12.0
"""Longer than the issuer's own requests usually take; the kubelet waits for two minutes."""

ERRORS: dict[grpc.StatusCode, type[CsiError]] = {
    grpc.StatusCode.PERMISSION_DENIED: NoPermission,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: Missing,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
}


@dataclass(frozen=True, slots=True)
class IssuerClient:
    """Implements `tickets.Issuer`; a connection for each call, which are few."""

    address: str
    ca_file: Path
    token_file: Path

    @property
    def needs_pod(self) -> bool:
        """See `tickets.Issuer`."""
        return True

    def issue(self, volume: VolumeId, context: Mapping[str, str]) -> Issued:
        """See `tickets.Issuer`."""
        return self._ask({"volume": str(volume), "pod_token": _pod_token(context)})

    def renew(self, volume: VolumeId, ticket: str, pods: Sequence[PodName]) -> Issued:
        """See `tickets.Issuer`."""
        named = [[pod.namespace, pod.name, pod.uid] for pod in pods[:PODS_MAX]]
        return self._ask({"volume": str(volume), "ticket": ticket, "pods": named})

    def _ask(self, request: dict[str, Any]) -> Issued:
        try:
            ca = self.ca_file.read_bytes()
            request["node_token"] = self.token_file.read_text().strip()
        except OSError as error:
            raise Unreachable(f"credentials of the node plugin: {error}") from error
        with grpc.secure_channel(self.address, grpc.ssl_channel_credentials(ca)) as channel:
            call = channel.unary_unary(f"/{SERVICE}/{METHOD}", None, None)
            try:
                answer = call(json.dumps(request).encode(), timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                refused: Any = error
                kind = ERRORS.get(refused.code(), Unreachable)
                raise kind(f"issuer `{self.address}`: {refused.details()}") from error
        return _issued(answer)


def _pod_token(context: Mapping[str, str]) -> str:
    """The pod's token for the issuer, as the kubelet gives it."""
    try:
        tokens: Any = json.loads(context.get(TOKENS, "{}"))
        token = tokens[AUDIENCE]["token"]
    except (ValueError, KeyError, TypeError):
        token = ""
    if not isinstance(token, str) or not token:
        raise FailedPrecondition(
            f"the request has no service account token for audience `{AUDIENCE}`; the CSIDriver "
            "object needs tokenRequests with this audience: install the chart again"
        )
    return token


def _issued(answer: bytes) -> Issued:
    try:
        data: Any = json.loads(answer)
        mgmtd = tuple(str(address) for address in data["mgmtd"])
        meta, tls = str(data["meta"]), bool(data.get("tls", False))
        return Issued(str(data["ticket"]), int(data["expires"]), mgmtd, meta, tls)
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable(
            "the issuer's answer cannot be read; is it of another version?"
        ) from error
