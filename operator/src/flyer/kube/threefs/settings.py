"""Settings of the operator that the objects of a ThreeFSCluster depend on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ClusterSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of all clusters, and the size with which one of them was created."""

    cluster_domain: str = "cluster.local"
    metrics_port: int = 8080
    """Port of the exporter next to mgmtd."""
    first_storage_nodes: int = 0
    """Storage services at the creation; 0: as many as now. mgmtd creates its first chains once
    they have registered, and is not restarted because their number changes later."""
