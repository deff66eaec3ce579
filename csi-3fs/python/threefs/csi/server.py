"""gRPC servers of the controller and the node: sockets, limits, and assembly of the services.

The mode of the socket's folder decides who may connect; the limits of requests are set here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from threefs.csi.copies.copies import Copies
from threefs.csi.errors import CsiError, InvalidArgument
from threefs.csi.interceptor import CallInterceptor
from threefs.csi.logs import logger
from threefs.csi.metrics import Metrics, NodeCollector, serve
from threefs.csi.mount_manager_client import MountManagerClient
from threefs.csi.proto import csi_pb2_grpc
from threefs.csi.services.controllerserver import ControllerServer
from threefs.csi.services.identityserver import IdentityServer
from threefs.csi.services.inline_volumes import InlineVolumes
from threefs.csi.services.nodeserver import NodeServer
from threefs.csi.tickets.issuer_client import IssuerClient
from threefs.csi.tickets.issuer_server import TlsFiles, serve_issuer
from threefs.csi.tickets.key_issuer import KeyIssuer
from threefs.csi.tickets.kubernetes import ApiServer
from threefs.csi.tickets.review import Policy
from threefs.csi.tickets.ticket_store import TicketStore
from threefs.csi.volumes.clusters import Clusters
from threefs.csi.volumes.topology import parse_topology

if TYPE_CHECKING:
    from threefs.csi.settings import ControllerSettings, NodeSettings

__all__ = ["make_server", "run_controller", "run_node", "socket_of"]

WIRE_BYTES_MAX = 4 << 20
"""gRPC refuses larger messages unread and uncounted; the interceptor's limit is far lower."""
WAITING_MAX = 64
"""Calls that may wait for a free worker; further calls are refused (RESOURCE_EXHAUSTED)."""
STOP_SECONDS = 10.0


def socket_of(endpoint: str) -> Path:
    """Return the path of a `unix://` endpoint."""
    path = endpoint.removeprefix("unix://")
    if not endpoint.startswith("unix://") or not path.startswith("/"):
        raise InvalidArgument(f"--endpoint is `{endpoint}`; it must be unix:///PATH")
    return Path(path)


def make_server(endpoint: str, workers: int, metrics: Metrics) -> grpc.Server:
    """Create a server at a socket, without services; a stale socket is replaced."""
    path = socket_of(endpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    server = grpc.server(
        ThreadPoolExecutor(workers, thread_name_prefix="csi"),
        interceptors=[CallInterceptor(metrics)],
        maximum_concurrent_rpcs=workers + WAITING_MAX,
        options=[
            ("grpc.max_receive_message_length", WIRE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
        ],
    )
    if server.add_insecure_port(f"unix://{path}") == 0:
        raise InvalidArgument(f"--endpoint: `{path}` cannot be bound; is its folder writable?")
    return server


def run_controller(settings: ControllerSettings) -> None:
    """Serve the controller until SIGTERM."""
    metrics = Metrics()
    clusters = Clusters(settings.clusters, settings.timeout_seconds)
    server = make_server(settings.endpoint, settings.workers, metrics)
    topology = parse_topology(settings.topology)
    identity = IdentityServer(
        settings.driver_name, is_ready=lambda: bool(clusters.names()), has_topology=bool(topology)
    )
    csi_pb2_grpc.add_IdentityServicer_to_server(identity, server)
    copies = Copies(clusters, metrics, settings.copy_workers)
    controller = ControllerServer(clusters, settings.default_size_bytes, metrics, copies, topology)
    csi_pb2_grpc.add_ControllerServicer_to_server(controller, server)
    serve(metrics, settings.metrics_port)
    copies.start()
    if not settings.issuer_listen:
        _serve_until_signal(server, settings.endpoint)
        copies.stop()
        return
    issuer = serve_issuer(
        settings.issuer_listen,
        TlsFiles(settings.issuer_tls),
        KeyIssuer(clusters, seconds=settings.ticket_seconds),
        _api_server(),
        Policy(settings.namespace, settings.node_account, settings.driver_name),
        metrics,
    )
    logger().info("issuer listens", port=issuer.port)
    _serve_until_signal(server, settings.endpoint)
    copies.stop()
    issuer.stop(STOP_SECONDS)


def run_node(settings: NodeSettings) -> None:
    """Serve the node service until SIGTERM; the mount manager keeps the mounts."""
    metrics = Metrics()
    clusters = Clusters(settings.clusters, settings.timeout_seconds)
    mount_manager = MountManagerClient(settings.mount_manager)
    metrics.registry.register(NodeCollector(mount_manager))
    folder = settings.mount_manager.parent
    key_issuer = KeyIssuer(clusters, settings.node_id, settings.ticket_seconds)
    key_tickets = TicketStore(folder, key_issuer, metrics, settings.timeout_seconds)
    tickets = key_tickets
    if settings.issuer:
        issuer = IssuerClient(settings.issuer, settings.issuer_ca, settings.issuer_token)
        tickets = TicketStore(folder, issuer, metrics, settings.timeout_seconds)
    inline = InlineVolumes(
        settings.node_id,
        clusters,
        key_tickets,
        mount_manager,
        metrics,
        settings.default_size_bytes,
        settings.inline_size_max_bytes,
    )

    def is_ready() -> bool:
        try:
            configured = bool(settings.issuer or clusters.names())
            return configured and not mount_manager.hello()["draining"]
        except CsiError:
            return False

    server = make_server(settings.endpoint, settings.workers, metrics)
    topology = parse_topology(settings.topology)
    identity = IdentityServer(settings.driver_name, is_ready=is_ready, has_topology=bool(topology))
    csi_pb2_grpc.add_IdentityServicer_to_server(identity, server)
    node = NodeServer(settings.node_id, tickets, mount_manager, inline, metrics, topology=topology)
    csi_pb2_grpc.add_NodeServicer_to_server(node, server)
    serve(metrics, settings.metrics_port)
    stop = threading.Event()
    threading.Thread(target=inline.sweep_until, args=(stop,), daemon=True).start()
    threading.Thread(target=node.renew_until, args=(stop,), daemon=True).start()
    _serve_until_signal(server, settings.endpoint)
    stop.set()


def _api_server() -> ApiServer:
    """Return the API server of this pod's cluster."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise InvalidArgument(
            "--issuer-listen is set, but KUBERNETES_SERVICE_HOST is not: tickets are issued for "
            "pods, so the issuer runs in a pod"
        )
    return ApiServer.in_cluster(host, int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")))


def _serve_until_signal(server: grpc.Server, endpoint: str) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    server.start()
    logger().info("serving", endpoint=endpoint)
    stop.wait()
    server.stop(STOP_SECONDS).wait(STOP_SECONDS + 1)
    logger().info("stopped")
