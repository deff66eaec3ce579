"""The identity service: who this driver is, and whether it can work."""

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

__all__ = ["DRIVER", "Identity"]

DRIVER = "3fs.csi.fireflyer.dev"


class Identity(csi_pb2_grpc.IdentityServicer):
    """Answers without asking 3FS: a cluster that is away is no reason to restart the driver."""

    def __init__(self, *, with_controller: bool, is_ready: Callable[[], bool]) -> None:
        self._with_controller = with_controller
        self._is_ready = is_ready

    def GetPluginInfo(
        self, request: csi.GetPluginInfoRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginInfoResponse:
        """Name and version."""
        return csi.GetPluginInfoResponse(name=DRIVER, vendor_version=_version())

    def GetPluginCapabilities(
        self, request: csi.GetPluginCapabilitiesRequest, context: grpc.ServicerContext
    ) -> csi.GetPluginCapabilitiesResponse:
        """A controller, and expansion of volumes in use."""
        capability = csi.PluginCapability
        capabilities = [
            capability(
                volume_expansion=capability.VolumeExpansion(type=capability.VolumeExpansion.ONLINE)
            )
        ]
        if self._with_controller:
            kind = capability.Service.CONTROLLER_SERVICE
            capabilities.insert(0, capability(service=capability.Service(type=kind)))
        return csi.GetPluginCapabilitiesResponse(capabilities=capabilities)

    def Probe(self, request: csi.ProbeRequest, context: grpc.ServicerContext) -> csi.ProbeResponse:
        """Ready once the settings of a cluster, and on a node the holder, are there."""
        return csi.ProbeResponse(ready=BoolValue(value=self._is_ready()))


def _version() -> str:
    try:
        return version("threefs")
    except PackageNotFoundError:
        return "unknown"
