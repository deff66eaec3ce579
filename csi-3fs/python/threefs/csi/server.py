"""The gRPC socket: who may connect is a matter of the folder's mode; how much is bounded here."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from threefs.csi.calls import Calls
from threefs.csi.controller import Controller
from threefs.csi.directories import Clusters
from threefs.csi.errors import CsiError, InvalidArgument
from threefs.csi.holder_client import HolderClient
from threefs.csi.identity import Identity
from threefs.csi.inline import InlineVolumes
from threefs.csi.issuer.client import IssuerClient
from threefs.csi.issuer.kubernetes import ApiServer
from threefs.csi.issuer.review import Policy
from threefs.csi.issuer.server import TlsFiles, serve_issuer
from threefs.csi.logs import logger
from threefs.csi.metrics import Metrics, NodeCollector, serve
from threefs.csi.node import Node
from threefs.csi.proto import csi_pb2_grpc
from threefs.csi.tickets import KeyIssuer, Tickets

if TYPE_CHECKING:
    from threefs.csi.settings import ControllerSettings, NodeSettings

__all__ = ["make_server", "run_controller", "run_node", "socket_of"]

WIRE_BYTES_MAX = 4 << 20
"""gRPC refuses more before memory is taken for it, uncounted; `calls` draws the line far below."""
WAITING_MAX = 64
"""Calls that may wait for a free worker; more are refused (RESOURCE_EXHAUSTED)."""
STOP_SECONDS = 10.0


def socket_of(endpoint: str) -> Path:
    """The path of a `unix://` endpoint."""
    path = endpoint.removeprefix("unix://")
    if not endpoint.startswith("unix://") or not path.startswith("/"):
        raise InvalidArgument(f"--endpoint is `{endpoint}`; it must be unix:///PATH")
    return Path(path)


def make_server(endpoint: str, workers: int, metrics: Metrics) -> grpc.Server:
    """A server at a socket, without services yet; a socket that was left there is replaced."""
    path = socket_of(endpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    server = grpc.server(
        ThreadPoolExecutor(workers, thread_name_prefix="csi"),
        interceptors=[Calls(metrics)],
        maximum_concurrent_rpcs=workers + WAITING_MAX,
        options=[
            ("grpc.max_receive_message_length", WIRE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
        ],
    )
    if server.add_insecure_port(f"unix://{path}") == 0:
        raise InvalidArgument(
            f"--endpoint: `{path}` cannot be listened at; is its folder writable?"
        )
    return server


def run_controller(settings: ControllerSettings) -> None:
    """Serve the controller until SIGTERM."""
    metrics = Metrics()
    clusters = Clusters(settings.clusters, settings.timeout_seconds)
    server = make_server(settings.endpoint, settings.workers, metrics)
    identity = Identity(settings.driver_name, is_ready=lambda: bool(clusters.names()))
    csi_pb2_grpc.add_IdentityServicer_to_server(identity, server)
    controller = Controller(clusters, settings.default_size_bytes, metrics)
    csi_pb2_grpc.add_ControllerServicer_to_server(controller, server)
    serve(metrics, settings.metrics_port)
    if not settings.issuer_listen:
        _serve_until_told(server, settings.endpoint)
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
    _serve_until_told(server, settings.endpoint)
    issuer.stop(STOP_SECONDS)


def run_node(settings: NodeSettings) -> None:
    """Serve the node service until SIGTERM; mounts stay, they are the holder's."""
    metrics = Metrics()
    clusters = Clusters(settings.clusters, settings.timeout_seconds)
    holder = HolderClient(settings.holder)
    metrics.registry.register(NodeCollector(holder))
    folder = settings.holder.parent
    own = KeyIssuer(clusters, settings.node_id, settings.ticket_seconds)
    own_tickets = Tickets(folder, own, metrics, settings.timeout_seconds)
    tickets = own_tickets
    if settings.issuer:
        issuer = IssuerClient(settings.issuer, settings.issuer_ca, settings.issuer_token)
        tickets = Tickets(folder, issuer, metrics, settings.timeout_seconds)
    inline = InlineVolumes(
        settings.node_id,
        clusters,
        own_tickets,
        holder,
        metrics,
        settings.default_size_bytes,
        settings.inline_size_max_bytes,
    )

    def is_ready() -> bool:
        try:
            known = bool(settings.issuer or clusters.names())
            return known and not holder.hello()["leaving"]
        except CsiError:
            return False

    server = make_server(settings.endpoint, settings.workers, metrics)
    identity = Identity(settings.driver_name, is_ready=is_ready)
    csi_pb2_grpc.add_IdentityServicer_to_server(identity, server)
    node = Node(settings.node_id, tickets, holder, inline, metrics)
    csi_pb2_grpc.add_NodeServicer_to_server(node, server)
    serve(metrics, settings.metrics_port)
    stop = threading.Event()
    threading.Thread(target=inline.sweep_until, args=(stop,), daemon=True).start()
    threading.Thread(target=node.renew_until, args=(stop,), daemon=True).start()
    _serve_until_told(server, settings.endpoint)
    stop.set()


def _api_server() -> ApiServer:
    """The API server of the cluster that this pod is in."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise InvalidArgument(
            "--issuer-listen is set, but KUBERNETES_SERVICE_HOST is not: tickets are issued for "
            "pods, so the issuer runs in a pod"
        )
    return ApiServer.in_cluster(host, int(os.environ.get("KUBERNETES_SERVICE_PORT", "443")))


def _serve_until_told(server: grpc.Server, endpoint: str) -> None:
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: told.set())
    server.start()
    logger().info("serving", endpoint=endpoint)
    told.wait()
    server.stop(STOP_SECONDS).wait(STOP_SECONDS + 1)
    logger().info("ended")
