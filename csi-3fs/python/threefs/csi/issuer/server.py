"""The port of the issuer: one unary call over TLS, bounded in size and number."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from threefs.csi.errors import CsiError, InvalidArgument, NoPermission, from_storage
from threefs.csi.issuer.client import METHOD, SERVICE, TEXT_BYTES_MAX
from threefs.csi.issuer.review import PODS_MAX, Denied, PodName, Policy, review, review_renewal
from threefs.csi.logs import logger
from threefs.csi.volume_id import VolumeId
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from threefs.csi.issuer.review import Kubernetes
    from threefs.csi.metrics import Metrics
    from threefs.csi.tickets import Issued, KeyIssuer

__all__ = ["TlsFiles", "serve_issuer"]

WORKERS = 8
WAITING_MAX = 56
"""Calls that may wait for a worker; each takes some milliseconds. More are refused, and come back
with the kubelet's next call."""
HANDSHAKE_MILLISECONDS = 5_000
IDLE_MILLISECONDS = 30_000
"""Node plugins open a connection for each call."""


class TlsFiles:
    """Certificate and key of the port, read again when either has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: tuple[bytes, bytes] = (b"", b"")

    def credentials(self) -> grpc.ServerCredentials:
        """For a server; new connections use the files as they are then."""
        first = self.changed()
        if first is None:
            raise InvalidArgument(f"--issuer-tls: `{self._folder}` holds no tls.crt and tls.key")
        # gRPC takes None for "as before", which its types do not say.
        changed: Any = self.changed
        return grpc.dynamic_ssl_server_credentials(first, changed)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The files, if they are not what was read last."""
        try:
            read = (
                (self._folder / "tls.key").read_bytes(),
                (self._folder / "tls.crt").read_bytes(),
            )
        except OSError:
            return None
        if read == self._read:
            return None
        self._read = read
        return grpc.ssl_server_certificate_configuration([read])


class Issue:
    """The one call."""

    def __init__(
        self, issuer: KeyIssuer, kubernetes: Kubernetes, policy: Policy, metrics: Metrics
    ) -> None:
        self._issuer = issuer
        self._kubernetes = kubernetes
        self._policy = policy
        self._metrics = metrics

    def __call__(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """Answer with a ticket, or with a code and a sentence."""
        volume = ""
        try:
            asked = _fields(raw)
            volume = asked["volume"]
            parsed = VolumeId.parse(volume)
            if parsed.is_inline:
                raise NoPermission(f"`{volume}` is an inline volume; those have no issuer")
            issued = self._issued(parsed, asked)
        except Denied as denied:
            return self._refuse(context, volume, NoPermission(f"no ticket: {denied}"))
        except CsiError as error:
            return self._refuse(context, volume, error)
        except ThreeFSError as error:
            return self._refuse(context, volume, from_storage(error))
        self._metrics.tickets.labels("issued").inc()
        logger().info("ticket issued", volume_id=volume, renewed="ticket" in asked)
        return json.dumps(
            {
                "ticket": issued.ticket,
                "expires": issued.expires_unix_s,
                "mgmtd": list(issued.mgmtd),
                "meta": issued.meta,
            }
        ).encode()

    def _issued(self, volume: VolumeId, asked: dict[str, Any]) -> Issued:
        kubernetes, policy, name = self._kubernetes, self._policy, str(volume)
        if "ticket" not in asked:
            allowed = review(kubernetes, policy, name, asked["node_token"], asked["pod_token"])
            return self._issuer.issue_for(volume, allowed.node, read_only=allowed.read_only)
        held = self._issuer.verify(volume, asked["ticket"])
        allowed = review_renewal(
            kubernetes, policy, name, asked["node_token"], held.node, asked["pods"]
        )
        return self._issuer.issue_for(
            volume, allowed.node, read_only=allowed.read_only, directory=held.directory
        )

    def _refuse(self, context: grpc.ServicerContext, volume: str, error: CsiError) -> bytes:
        self._metrics.tickets.labels("refused").inc()
        logger().warning("ticket refused", volume_id=volume[:128], error=error.message)
        context.abort(error.code, error.message)


def serve_issuer(
    address: str,
    tls: TlsFiles,
    issuer: KeyIssuer,
    kubernetes: Kubernetes,
    policy: Policy,
    metrics: Metrics,
) -> tuple[grpc.Server, int]:
    """A server that has started, and its port."""
    call: Callable[[bytes, grpc.ServicerContext], bytes] = Issue(
        issuer, kubernetes, policy, metrics
    )
    handler = grpc.unary_unary_rpc_method_handler(call)
    server = grpc.server(
        ThreadPoolExecutor(WORKERS, thread_name_prefix="issuer"),
        handlers=[grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})],
        maximum_concurrent_rpcs=WORKERS + WAITING_MAX,
        options=[
            ("grpc.max_receive_message_length", TEXT_BYTES_MAX),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MILLISECONDS),
            ("grpc.max_connection_idle_ms", IDLE_MILLISECONDS),
            ("grpc.so_reuseport", 0),
        ],
    )
    port = server.add_secure_port(address, tls.credentials())
    if port == 0:
        raise InvalidArgument(f"--issuer-listen: `{address}` cannot be listened at")
    server.start()
    return server, port


def _fields(raw: bytes) -> dict[str, Any]:
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("the request is not JSON") from error
    if not isinstance(data, dict):
        raise InvalidArgument("the request is not an object")
    renewal = "ticket" in data
    fields: dict[str, Any] = {}
    for name in ("volume", "node_token", "ticket" if renewal else "pod_token"):
        value = data.get(name)
        if not isinstance(value, str) or not value:
            raise InvalidArgument(f"{name} is missing")
        fields[name] = value
    if renewal:
        fields["pods"] = _pods(data.get("pods"))
    return fields


def _pods(named: object) -> list[PodName]:
    if not isinstance(named, list) or not 0 < len(named) <= PODS_MAX:
        raise InvalidArgument(f"pods must be a list of one to {PODS_MAX}")
    pods = []
    for one in named:
        texts = isinstance(one, list) and all(isinstance(part, str) and part for part in one)
        if not texts or len(one) != len(("namespace", "name", "uid")):
            raise InvalidArgument("pods must be lists of namespace, name and uid")
        pods.append(PodName(*one))
    return pods
