"""Names, labels and addresses of the objects of a ThreeFSCluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flyer.api import ThreeFSCluster

__all__ = [
    "COMPONENT_DRAIN",
    "DIGEST_ANNOTATION",
    "KINDS",
    "LABEL_COMPONENT",
    "LABEL_INSTANCE",
    "NODES_ANNOTATION",
    "PORTS",
    "addresses",
    "claim_name",
    "component",
    "labels",
    "node_id",
    "pod_name",
    "replicas_of",
    "selector",
]

KINDS: Final = ("storage", "mgmtd", "meta")
"""The services in the order of an upgrade: storage understands the requests of a newer meta."""
PORTS: Final = {"mgmtd": 9000, "meta": 9001, "storage": 9002}
LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
DIGEST_ANNOTATION: Final = "fireflyer.dev/digest"
"""Digest of the fields of an object that the operator sets."""
NODES_ANNOTATION: Final = "fireflyer.dev/storage-nodes"
"""Numbers of the storage services that a drain Job drains, with commas."""
COMPONENT_DRAIN: Final = "threefs-drain"


def component(kind: str) -> str:
    """The name of a service's objects."""
    return f"threefs-{kind}"


def pod_name(kind: str, ordinal: int) -> str:
    """The name of a pod of a StatefulSet."""
    return f"{component(kind)}-{ordinal}"


def claim_name(disk: int) -> str:
    """The name of the volume of a service's disk, and of its claim template."""
    return f"disk-{disk}" if disk else "data"


def node_id(ordinal: int) -> int:
    """The number of a storage service in 3FS."""
    return ordinal + 1


def selector(cluster: ThreeFSCluster, component_name: str) -> dict[str, str]:
    """Labels that never change."""
    return {
        LABEL_NAME: "fire-flyer",
        LABEL_INSTANCE: cluster.metadata.name,
        LABEL_COMPONENT: component_name,
    }


def labels(cluster: ThreeFSCluster, component_name: str) -> dict[str, str]:
    """Labels of objects and pods."""
    return {
        **selector(cluster, component_name),
        "app.kubernetes.io/part-of": "fire-flyer",
        "app.kubernetes.io/managed-by": "flyer-operator",
    }


def replicas_of(cluster: ThreeFSCluster, kind: str) -> int:
    """The desired number of pods of a service."""
    spec = cluster.spec
    return {
        "mgmtd": spec.mgmtd.replicas, "meta": spec.meta.replicas, "storage": spec.storage.replicas,
    }[kind]  # fmt: skip


def addresses(cluster: ThreeFSCluster, kind: str, domain: str) -> list[str]:
    """Addresses of mgmtd or meta; one service has the name of its Service, as in the chart."""
    service, count = component(kind), replicas_of(cluster, kind)
    host = f"{service}.{cluster.metadata.namespace}.svc.{domain}:{PORTS[kind]}"
    if count == 1:
        return [host]
    return [f"{pod_name(kind, ordinal)}.{host}" for ordinal in range(count)]
