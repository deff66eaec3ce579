"""Port of the ticket issuer: one unary call over TLS, bounded in size and number."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from threefs.cluster import one_or_list
from threefs.csi.errors import CsiError, InvalidArgument, NoPermission, from_storage
from threefs.csi.logs import logger
from threefs.csi.tickets.issuer_client import METHOD, SERVICE, TEXT_BYTES_MAX
from threefs.csi.tickets.review import PODS_MAX, Denied, PodName, Policy, review, review_renewal
from threefs.csi.volumes.volume_id import VolumeId
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from threefs.csi.metrics import Metrics
    from threefs.csi.tickets.key_issuer import Issued, KeyIssuer
    from threefs.csi.tickets.review import Kubernetes

__all__ = ["IssuerServer", "RequestSlots", "TlsFiles", "serve_issuer"]

T = TypeVar("T")

WORKERS = 8
REQUESTS_MAX = 512
"""Running and queued requests, each some milliseconds of a worker and at most `TEXT_BYTES_MAX`.
Further requests are refused, and retried with the kubelet's next call."""
REQUESTS_PER_ADDRESS_MAX = 32
"""Twice the number of workers of a node plugin; each node plugin has its own address."""
OPTIONS = [
    ("grpc.max_receive_message_length", TEXT_BYTES_MAX),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Node plugins open a connection for each call.
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_concurrent_streams", 4),
    # Ends calls whose request does not arrive.
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 15_000),
    ("grpc.so_reuseport", 0),
]


class TlsFiles:
    """Certificate and key of the port, reloaded when either has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: tuple[bytes, bytes] = (b"", b"")

    def credentials(self) -> grpc.ServerCredentials:
        """Return server credentials; new connections use the current files."""
        first = self.changed()
        if first is None:
            raise InvalidArgument(f"--issuer-tls: `{self._folder}` holds no tls.crt and tls.key")
        # gRPC treats None as unchanged, which its type hints omit.
        changed: Any = self.changed
        return grpc.dynamic_ssl_server_credentials(first, changed)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration if the files have changed since the last call."""
        try:
            key = (
                (self._folder / "tls.key").read_bytes(),
                (self._folder / "tls.crt").read_bytes(),
            )
        except OSError:
            return None
        if key == self._read:
            return None
        self._read = key
        return grpc.ssl_server_certificate_configuration([key])


class CallError(Exception):
    """A status code and a message for the caller."""

    def __init__(self, error: CsiError) -> None:
        super().__init__(error.message)
        self.code = error.code
        self.message = error.message


class IssueHandler:
    """Handler of the issue call."""

    def __init__(
        self, issuer: KeyIssuer, kubernetes: Kubernetes, policy: Policy, metrics: Metrics
    ) -> None:
        self._issuer = issuer
        self._kubernetes = kubernetes
        self._policy = policy
        self._metrics = metrics

    def __call__(self, raw: bytes) -> bytes:
        """Return a ticket, or raise `CallError`."""
        volume = ""
        try:
            request = _fields(raw)
            volume = request["volume"]
            parsed = VolumeId.parse(volume)
            if parsed.is_inline:
                raise NoPermission(f"`{volume}` is an inline volume; the issuer serves only claims")
            issued = self._issued(parsed, request)
        except Denied as denied:
            raise self._refused(volume, NoPermission(f"no ticket: {denied}")) from denied
        except CsiError as error:
            raise self._refused(volume, error) from error
        except ThreeFSError as error:
            raise self._refused(volume, from_storage(error)) from error
        self._metrics.tickets.labels("issued").inc()
        logger().info("ticket issued", volume_id=volume, renewed="ticket" in request)
        return json.dumps(
            {
                "ticket": issued.ticket,
                "expires": issued.expires_unix_s,
                "mgmtd": list(issued.mgmtd),
                "meta": one_or_list(issued.meta),
                "tls": issued.tls,
            }
        ).encode()

    def _issued(self, volume: VolumeId, request: dict[str, Any]) -> Issued:
        kubernetes, policy, name = self._kubernetes, self._policy, str(volume)
        if "ticket" not in request:
            allowed = review(kubernetes, policy, name, request["node_token"], request["pod_token"])
            return self._issuer.issue_for(volume, allowed.node, read_only=allowed.read_only)
        info = self._issuer.verify(volume, request["ticket"])
        allowed = review_renewal(
            kubernetes, policy, name, request["node_token"], info.node, request["pods"]
        )
        return self._issuer.issue_for(
            volume, allowed.node, read_only=allowed.read_only, directory=info.directory
        )

    def _refused(self, volume: str, error: CsiError) -> CallError:
        self._metrics.tickets.labels("refused").inc()
        logger().warning("ticket refused", volume_id=volume[:128], error=error.message)
        return CallError(error)


class RequestSlots:
    """Slots for running and queued requests, in total and per address."""

    def __init__(
        self, total: int = REQUESTS_MAX, per_address: int = REQUESTS_PER_ADDRESS_MAX
    ) -> None:
        self._total = total
        self._per_address = per_address
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    def acquire(self, peer: str) -> Callable[[], None] | None:
        """Acquire a slot for a peer (`ipv4:10.0.0.1:4711`); return a function that releases it."""
        address = peer.rpartition(":")[0]
        with self._lock:
            full = self._used.total() >= self._total
            if full or self._used[address] >= self._per_address:
                return None
            self._used[address] += 1
        return lambda: self._release(address)

    def _release(self, address: str) -> None:
        with self._lock:
            self._used[address] -= 1
            if not self._used[address]:
                del self._used[address]


class IssuerServer:
    """The port, on a thread with an event loop: a call uses a worker once its request has arrived.

    In a threaded server, a call without its request would occupy a thread.
    """

    def __init__(self, address: str, tls: TlsFiles, issue: IssueHandler) -> None:
        self._issue = issue
        self._slots = RequestSlots()
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="issuer")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="issuer", daemon=True)
        self._thread.start()
        try:
            self._server, self.port = self._run(self._start(address, tls))
        except CsiError:
            self._end()
            raise

    def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, and cancel running calls after the grace period."""
        self._run(self._server.stop(grace_seconds))
        self._end()

    async def _start(self, address: str, tls: TlsFiles) -> tuple[grpc.aio.Server, int]:
        handler = grpc.unary_unary_rpc_method_handler(self._call)
        server = grpc.aio.server(
            handlers=[grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})],
            options=OPTIONS,
        )
        try:
            port = server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise InvalidArgument(f"--issuer-listen: {error}") from error
        if port == 0:
            raise InvalidArgument(f"--issuer-listen: `{address}` cannot be bound")
        await server.start()
        return server, port

    async def _call(self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        release = self._slots.acquire(context.peer())
        if release is None:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests in progress; retry later"
            )
        work = self._workers.submit(self._issue, raw)
        # Not when the caller disconnects: the work continues then.
        work.add_done_callback(lambda _: release())
        try:
            return await asyncio.wrap_future(work)
        except CallError as refused:
            await context.abort(refused.code, refused.message)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def serve_issuer(
    address: str,
    tls: TlsFiles,
    issuer: KeyIssuer,
    kubernetes: Kubernetes,
    policy: Policy,
    metrics: Metrics,
) -> IssuerServer:
    """Start a server."""
    return IssuerServer(address, tls, IssueHandler(issuer, kubernetes, policy, metrics))


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


def _pods(names: object) -> list[PodName]:
    if not isinstance(names, list) or not 0 < len(names) <= PODS_MAX:
        raise InvalidArgument(f"pods must be a list of one to {PODS_MAX}")
    pods = []
    for name in names:
        texts = isinstance(name, list) and all(isinstance(part, str) and part for part in name)
        if not texts or len(name) != len(("namespace", "name", "uid")):
            raise InvalidArgument("pods must be lists of namespace, name and uid")
        pods.append(PodName(*name))
    return pods
