"""Name, version and capabilities of the driver."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from threefs.csi.proto import csi_pb2 as csi

if TYPE_CHECKING:
    from .driver import Driver


def test_name_version_and_readiness(driver: Driver) -> None:
    info = driver.call(csi.GetPluginInfoRequest())
    assert info.name == "3fs.csi.fireflyer.dev"
    assert re.fullmatch(r"[a-zA-Z0-9]([-a-zA-Z0-9.]{0,61}[a-zA-Z0-9])?", info.name)
    assert info.vendor_version
    assert driver.call(csi.ProbeRequest()).ready.value


def test_capabilities(driver: Driver) -> None:
    plugin = driver.call(csi.GetPluginCapabilitiesRequest()).capabilities
    assert csi.PluginCapability.Service.CONTROLLER_SERVICE in [c.service.type for c in plugin]
    assert csi.PluginCapability.VolumeExpansion.ONLINE in [c.volume_expansion.type for c in plugin]
    rpc = csi.ControllerServiceCapability.RPC
    controller = driver.call(csi.ControllerGetCapabilitiesRequest()).capabilities
    assert {c.rpc.type for c in controller} == {
        rpc.CREATE_DELETE_VOLUME,
        rpc.LIST_VOLUMES,
        rpc.GET_CAPACITY,
        rpc.EXPAND_VOLUME,
        rpc.GET_VOLUME,
        rpc.VOLUME_CONDITION,
        rpc.MODIFY_VOLUME,
        rpc.CREATE_DELETE_SNAPSHOT,
        rpc.LIST_SNAPSHOTS,
        rpc.GET_SNAPSHOT,
        rpc.CLONE_VOLUME,
        rpc.SINGLE_NODE_MULTI_WRITER,
    }
    node_rpc = csi.NodeServiceCapability.RPC
    node = driver.call(csi.NodeGetCapabilitiesRequest()).capabilities
    assert {c.rpc.type for c in node} == {
        node_rpc.STAGE_UNSTAGE_VOLUME,
        node_rpc.GET_VOLUME_STATS,
        node_rpc.EXPAND_VOLUME,
        node_rpc.VOLUME_CONDITION,
        node_rpc.SINGLE_NODE_MULTI_WRITER,
    }
    assert driver.call(csi.NodeGetInfoRequest()).node_id == "node-a"
