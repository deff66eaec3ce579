"""The port of the issuer: one unary call over TLS, bounded in size and number."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from threefs.csi.errors import CsiError, InvalidArgument, NoPermission, from_storage
from threefs.csi.issuer.client import METHOD, SERVICE, TEXT_BYTES_MAX
from threefs.csi.issuer.review import PODS_MAX, Denied, PodName, Policy, review, review_renewal
from threefs.csi.logs import logger
from threefs.csi.volume_id import VolumeId
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from threefs.csi.issuer.review import Kubernetes
    from threefs.csi.metrics import Metrics
    from threefs.csi.tickets import Issued, KeyIssuer

__all__ = ["IssuerServer", "Places", "TlsFiles", "serve_issuer"]

T = TypeVar("T")

WORKERS = 8
PLACES = 512
"""Requests that are worked on or wait, each some milliseconds of a worker and at most
`TEXT_BYTES_MAX`. More are refused, and come back with the kubelet's next call."""
PLACES_OF_ADDRESS = 32
"""Twice as many as a node plugin has workers; node plugins have an address each."""
OPTIONS = [
    ("grpc.max_receive_message_length", TEXT_BYTES_MAX),
    ("grpc.server_handshake_timeout_ms", 5_000),
    # Node plugins open a connection for each call.
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_concurrent_streams", 4),
    # Ends calls whose request does not come.
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 15_000),
    ("grpc.so_reuseport", 0),
]


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


class Refused(Exception):  # noqa: N818 -- it is an answer
    """A code and a sentence for the caller."""

    def __init__(self, error: CsiError) -> None:
        super().__init__(error.message)
        self.code = error.code
        self.message = error.message


class Issue:
    """The one call."""

    def __init__(
        self, issuer: KeyIssuer, kubernetes: Kubernetes, policy: Policy, metrics: Metrics
    ) -> None:
        self._issuer = issuer
        self._kubernetes = kubernetes
        self._policy = policy
        self._metrics = metrics

    def __call__(self, raw: bytes) -> bytes:
        """Answer with a ticket, or raise `Refused`."""
        volume = ""
        try:
            asked = _fields(raw)
            volume = asked["volume"]
            parsed = VolumeId.parse(volume)
            if parsed.is_inline:
                raise NoPermission(f"`{volume}` is an inline volume; those have no issuer")
            issued = self._issued(parsed, asked)
        except Denied as denied:
            raise self._refused(volume, NoPermission(f"no ticket: {denied}")) from denied
        except CsiError as error:
            raise self._refused(volume, error) from error
        except ThreeFSError as error:
            raise self._refused(volume, from_storage(error)) from error
        self._metrics.tickets.labels("issued").inc()
        logger().info("ticket issued", volume_id=volume, renewed="ticket" in asked)
        return json.dumps(
            {
                "ticket": issued.ticket,
                "expires": issued.expires_unix_s,
                "mgmtd": list(issued.mgmtd),
                "meta": issued.meta,
                "tls": issued.tls,
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

    def _refused(self, volume: str, error: CsiError) -> Refused:
        self._metrics.tickets.labels("refused").inc()
        logger().warning("ticket refused", volume_id=volume[:128], error=error.message)
        return Refused(error)


class Places:
    """Requests that are worked on or wait, in all and of one address."""

    def __init__(self, in_all: int = PLACES, of_address: int = PLACES_OF_ADDRESS) -> None:
        self._in_all = in_all
        self._of_address = of_address
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, peer: str) -> Callable[[], None] | None:
        """A place for a request of a peer (`ipv4:10.0.0.1:4711`); what is returned frees it."""
        address = peer.rpartition(":")[0]
        with self._lock:
            full = self._taken.total() >= self._in_all
            if full or self._taken[address] >= self._of_address:
                return None
            self._taken[address] += 1
        return lambda: self._free(address)

    def _free(self, address: str) -> None:
        with self._lock:
            self._taken[address] -= 1
            if not self._taken[address]:
                del self._taken[address]


class IssuerServer:
    """The port, on a thread with an event loop: a call takes a worker when its request is there.

    With a server of threads, a call without its request would hold a thread.
    """

    def __init__(self, address: str, tls: TlsFiles, issue: Issue) -> None:
        self._issue = issue
        self._places = Places()
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
        """Refuse new calls; end those that are there when this time has passed."""
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
            raise InvalidArgument(f"--issuer-listen: `{address}` cannot be listened at")
        await server.start()
        return server, port

    async def _call(self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        free = self._places.take(context.peer())
        if free is None:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests at once; ask again later"
            )
        work = self._workers.submit(self._issue, raw)
        # Not when the caller has gone: the work is still done then.
        work.add_done_callback(lambda _: free())
        try:
            return await asyncio.wrap_future(work)
        except Refused as refused:
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
    """A server that has started."""
    return IssuerServer(address, tls, Issue(issuer, kubernetes, policy, metrics))


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
