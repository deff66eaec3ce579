"""ThreeFSClusters that exclude each other: of one namespace, or with the same rows. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flyer.api import ThreeFSCluster

__all__ = ["rival_of"]


def rival_of(cluster: ThreeFSCluster, others: Iterable[ThreeFSCluster]) -> str:
    """Why another cluster excludes this one; empty: none does."""
    for other in others:
        if _order(other) >= _order(cluster):
            continue
        name = f"{other.metadata.namespace}/{other.metadata.name}"
        if other.metadata.namespace == cluster.metadata.namespace:
            return f"the namespace has a ThreeFSCluster already, {other.metadata.name}: use another"
        if prefix := _shared_prefix(cluster, other):
            return (
                f"spec.metadata.etcd.prefix: {prefix} of these endpoints has the rows of {name}: "
                "use another prefix, such as /3fs-2"
            )
        if schema := _shared_schema(cluster, other):
            return (
                f"spec.metadata.postgres.schema: {schema} of this database has the rows of {name}: "
                f"use another schema, such as {schema}_2"
            )
    return ""


def _order(cluster: ThreeFSCluster) -> tuple[bool, float, str]:
    """Clusters that run come first, then older ones; the uid decides within the same second."""
    conditions = () if cluster.status is None else cluster.status.conditions
    runs = any(it.type == "Accepted" and it.status == "True" for it in conditions)
    return not runs, cluster.metadata.creation_timestamp or 0.0, cluster.metadata.uid or ""


def _shared_prefix(cluster: ThreeFSCluster, other: ThreeFSCluster) -> str:
    one, two = cluster.spec.metadata.etcd, other.spec.metadata.etcd
    if one is None or two is None or not set(one.endpoints) & set(two.endpoints):
        return ""
    first, second = f"{one.prefix}/", f"{two.prefix}/"
    return one.prefix if first.startswith(second) or second.startswith(first) else ""


def _shared_schema(cluster: ThreeFSCluster, other: ThreeFSCluster) -> str:
    one, two = cluster.spec.metadata.postgres, other.spec.metadata.postgres
    if one is None or two is None or not set(one.hosts) & set(two.hosts):
        return ""
    same = (one.database, one.schema_) == (two.database, two.schema_)
    return one.schema_ if same else ""
