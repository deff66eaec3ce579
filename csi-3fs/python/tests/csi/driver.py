"""The whole driver behind one real gRPC socket, over 3FS and a mount manager in memory."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import threefs
from threefs.csi.copies.copies import Copies
from threefs.csi.metrics import Metrics, NodeCollector
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.proto import csi_pb2_grpc as stubs
from threefs.csi.server import make_server
from threefs.csi.services.controllerserver import ControllerServer
from threefs.csi.services.identityserver import IdentityServer
from threefs.csi.services.inline_volumes import InlineVolumes
from threefs.csi.services.nodeserver import NodeServer
from threefs.csi.settings import DRIVER
from threefs.csi.tickets.key_issuer import KeyIssuer
from threefs.csi.tickets.ticket_store import TicketStore
from threefs.csi.volumes.clusters import Clusters
from threefs.csi.volumes.node_claims import NodeClaims
from threefs.csi.volumes.topology import Topology

from .doubles.directories import MemoryDirectories, MemoryTicket
from .doubles.mount_manager import MemoryMountManager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from threefs.cluster import ClusterFile
    from threefs.csi.tickets.key_issuer import Issuer

CALL_SECONDS = 60.0
TIMEOUT_SECONDS = 10.0
GIBIBYTE = 1 << 30
INLINE_MAX = 4 * GIBIBYTE
Mode = csi.VolumeCapability.AccessMode


@dataclass
class Driver:
    """A driver and its callers."""

    folder: Path
    files: MemoryDirectories = field(default_factory=MemoryDirectories)
    mount_manager: MemoryMountManager = field(default_factory=MemoryMountManager)
    metrics: Metrics = field(default_factory=Metrics)
    name: str = DRIVER
    topology: Topology = field(default_factory=Topology)
    issuer: Issuer | None = None
    """Issuer of the node's tickets; default: issued with the key."""
    now: float = 0.0
    wall: float = 1_000_000.0
    timeouts: list[float] = field(default_factory=list)
    """Arguments of each connection to 3FS."""

    def __post_init__(self) -> None:
        default = self.folder / "clusters" / "default"
        default.mkdir(parents=True)
        (default / "cluster.json").write_text(
            '{"mgmtd": ["a:1"], "meta": "a:2", "key_file": "key"}'
        )

        def connect(_file: ClusterFile, timeout_seconds: float) -> MemoryDirectories:
            self.timeouts.append(timeout_seconds)
            return self.files

        def connect_with_ticket(file: ClusterFile, timeout_seconds: float) -> Any:
            self.timeouts.append(timeout_seconds)
            ticket = json.loads(Path(file.key_file).read_text())
            return MemoryTicket(self.files, ticket["path"])

        def clock() -> float:
            return self.wall

        clusters = Clusters(self.folder / "clusters", TIMEOUT_SECONDS, connect)
        self.key_issuer = KeyIssuer(clusters, "node-a", seal=sealed, unseal=unsealed, clock=clock)
        self.tickets = TicketStore(
            self.folder,
            self.issuer or self.key_issuer,
            self.metrics,
            TIMEOUT_SECONDS,
            connect_with_ticket,
            clock,
        )
        self.inline = InlineVolumes(
            "node-a", clusters, self.tickets, self.mount_manager, self.metrics, GIBIBYTE, INLINE_MAX
        )
        self.copies = Copies(clusters, self.metrics, workers=2, watch_seconds=0.0)
        self.copies.start()
        self.controller = ControllerServer(
            clusters, GIBIBYTE, self.metrics, self.copies, self.topology
        )
        endpoint = f"unix://{self.folder}/csi.sock"
        self.clusters = clusters
        self.server = make_server(endpoint, 8, self.metrics)
        self.metrics.registry.register(NodeCollector(self.mount_manager))
        stubs.add_IdentityServicer_to_server(
            IdentityServer(self.name, is_ready=lambda: True, has_topology=bool(self.topology)),
            self.server,
        )
        stubs.add_ControllerServicer_to_server(
            self.controller,
            self.server,
        )
        claims = NodeClaims("node-a", lambda: self.now)
        self.node = NodeServer(
            "node-a",
            self.tickets,
            self.mount_manager,
            self.inline,
            self.metrics,
            claims,
            self.topology,
        )
        stubs.add_NodeServicer_to_server(self.node, self.server)
        self.server.start()
        self.channel = grpc.insecure_channel(endpoint)
        self._stubs = [
            stubs.IdentityStub(self.channel),
            stubs.ControllerStub(self.channel),
            stubs.NodeStub(self.channel),
        ]

    def call(self, request: Any) -> Any:
        """Send a request to the method with its name."""
        name = type(request).__name__.removesuffix("Request")
        for stub in self._stubs:
            if hasattr(stub, name):
                return getattr(stub, name)(request, timeout=CALL_SECONDS)
        raise AssertionError(name)

    def refused(self, request: Any) -> tuple[str, str]:
        """The code and message of a request that must be refused; it is counted once."""
        call = type(request).__name__.removesuffix("Request")
        before = self.counts(call)
        with pytest.raises(grpc.RpcError) as excinfo:
            self.call(request)
        error: Any = excinfo.value
        code: str = error.code().name
        assert self.counts(call) - before == Counter({code: 1})
        return code, error.details()

    def code(self, request: Any) -> str:
        """The code of a request that may succeed or fail."""
        try:
            self.call(request)
        except grpc.RpcError as error:
            call: Any = error
            return str(call.code().name)
        return "OK"

    def create(self, name: str, **more: Any) -> Any:
        request = csi.CreateVolumeRequest(name=name, volume_capabilities=[capability()], **more)
        return self.call(request).volume

    def stage(self, volume: str, path: str = "/k/stage", **more: Any) -> Any:
        return self.call(stage_request(volume, path, **more))

    def publish(self, volume: str, path: str = "/k/pod", **more: Any) -> Any:
        return self.call(publish_request(volume, path, **more))

    def counts(self, call: str) -> Counter[str]:
        """Number of answers of a call by code."""
        return Counter(
            {
                sample.labels["code"]: int(sample.value)
                for family in self.metrics.calls.collect()
                for sample in family.samples
                if sample.name == "threefs_csi_calls_total" and sample.labels["call"] == call
            }
        )

    def counted(self, call: str, code: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "threefs_csi_calls_total", {"call": call, "code": code}
        )
        return value or 0.0

    def close(self) -> None:
        self.channel.close()
        self.copies.stop()
        self.server.stop(None)


def sealed(_key_file: str, **fields: Any) -> str:
    """Instead of a ticket: its fields."""
    return json.dumps(fields)


def unsealed(_key_file: str, ticket: str) -> tuple[str, int, str, bool, str, int]:
    """Tickets made by `sealed`; all others are forged."""
    try:
        fields = json.loads(ticket)
        names = ("cluster", "directory", "path", "read_only", "node", "expires_unix_s")
        cluster, directory, path, read_only, node, expires = (fields[name] for name in names)
    except (ValueError, KeyError) as error:
        raise threefs.InvalidArgument(
            "the ticket is not sealed by a key of the key file"
        ) from error
    return cluster, directory, path, read_only, node, expires


def capability(
    mode: Any = Mode.MULTI_NODE_MULTI_WRITER, flags: tuple[str, ...] = ()
) -> csi.VolumeCapability:
    return csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(mount_flags=flags),
        access_mode=Mode(mode=mode),
    )


def stage_request(volume: str, path: str = "/k/stage", **more: Any) -> csi.NodeStageVolumeRequest:
    fields = {"volume_capability": capability(), **more}
    return csi.NodeStageVolumeRequest(volume_id=volume, staging_target_path=path, **fields)


def publish_request(
    volume: str, path: str = "/k/pod", stage: str = "/k/stage", **more: Any
) -> csi.NodePublishVolumeRequest:
    fields = {"volume_capability": capability(), **more}
    return csi.NodePublishVolumeRequest(
        volume_id=volume, target_path=path, staging_target_path=stage, **fields
    )


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.files.unblocked.set()
    driver.close()
