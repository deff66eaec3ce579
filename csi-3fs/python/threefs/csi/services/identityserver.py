"""CSI identity service: name, version, capabilities and readiness of the driver."""

# ruff: noqa: ARG002, N802 -- methods and their arguments are the specification's.

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from google.protobuf.wrappers_pb2 import BoolValue

from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.proto import csi_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

__all__ = ["IdentityServer"]


class IdentityServer(csi_pb2_grpc.IdentityServicer):
    """Answers without requests to 3FS: an unreachable cluster must not restart the driver."""

    def __init__(
        self, name: str, *, is_ready: Callable[[], bool], has_topology: bool = False
    ) -> None:
        self._name = name
        self._has_topology = has_topology
        self._is_ready = is_ready

    def GetPluginInfo(
        self, request: csi.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginInfoResponse:
        """Return name and version."""
        return csi.GetPluginInfoResponse(name=self._name, vendor_version=_version())

    def GetPluginCapabilities(
        self, request: csi.GetPluginCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginCapabilitiesResponse:
        """Return the capabilities: a controller, expansion of volumes in use, a topology."""
        capability = csi.PluginCapability
        service = capability.Service
        kinds = [service.CONTROLLER_SERVICE]
        if self._has_topology:
            kinds.append(service.VOLUME_ACCESSIBILITY_CONSTRAINTS)
        capabilities = [capability(service=service(type=kind)) for kind in kinds]
        online = capability.VolumeExpansion(type=capability.VolumeExpansion.ONLINE)
        capabilities.append(capability(volume_expansion=online))
        return csi.GetPluginCapabilitiesResponse(capabilities=capabilities)

    def Probe(self, request: csi.ProbeRequest, context: grpc.ServicerContext) -> csi.ProbeResponse:
        """Return ready once a cluster is configured and, on a node, the mount manager answers."""
        return csi.ProbeResponse(ready=BoolValue(value=self._is_ready()))


def _version() -> str:
    try:
        return version("threefs")
    except PackageNotFoundError:
        return "unknown"
