"""ThreeFSCluster v1alpha1: a 3FS whose services the operator runs.

The operator creates the StatefulSets, restarts their pods one at a time for a new version, and
drains storage services before it removes them. `metadata.name` is the value of the label
`app.kubernetes.io/instance` of all objects; the names of the objects are fixed, so a namespace has
at most one ThreeFSCluster.
"""

# ruff: noqa: TC001 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from flyer.api.base import StrictModel
from flyer.api.metadata import LABEL_VALUE, SUBDOMAIN, ObjectMeta
from flyer.api.names import API_VERSION, KIND_THREEFS
from flyer.api.rules import Rule, list_set, message_expression, rules
from flyer.api.threefsmetadata import VOLUME_SIZE, MetadataStore, StorageClassName
from flyer.api.threefsstatus import ThreeFSClusterStatus

if TYPE_CHECKING:
    from pydantic.config import JsonDict

STORAGE_MAX = 1_000
DISKS_MAX = 64
"""Claims of a pod: as many as a machine has slots for disks."""
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
_CHUNK_SIZES = tuple(f"{1 << n}Ki" for n in range(6, 10)) + tuple(f"{1 << n}Mi" for n in range(7))


def _amounts(what: str) -> JsonDict:
    return {
        "maxProperties": 16,
        "description": what,
        "additionalProperties": {"type": "string", "maxLength": 32, "pattern": _QUANTITY},
    }


class DeletionPolicy(StrEnum):
    """What happens to the claims of a deleted ThreeFSCluster."""

    RETAIN = "Retain"
    DELETE = "Delete"


class ResourceAmounts(StrictModel):
    """Resources of a container, as in a pod."""

    requests: dict[str, str] = Field(
        default={}, json_schema_extra=_amounts("Requested amounts by resource, as strings.")
    )
    limits: dict[str, str] = Field(
        default={}, json_schema_extra=_amounts("Maximum amounts by resource, as strings.")
    )


def _resources(cpu: str, memory: str, memory_max: str) -> ResourceAmounts:
    return ResourceAmounts(requests={"cpu": cpu, "memory": memory}, limits={"memory": memory_max})


class Toleration(StrictModel):
    """A taint that the pods tolerate, as in a pod."""

    key: str = Field(default="", max_length=316, description="Key of the taint; all if empty.")
    operator: Literal["Equal", "Exists"] = Field(
        default="Equal", description="How the value is compared: Equal or Exists."
    )
    value: str = Field(default="", max_length=63, description="Value of the taint, with Equal.")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        default="", description="Effect of the taint; all effects if empty."
    )


class Placement(StrictModel):
    """Nodes on which the pods of a service may run."""

    node_selector: dict[str, str] = Field(
        default={},
        description="Labels of the nodes on which the pods may run.",
        json_schema_extra={
            "maxProperties": 32,
            "additionalProperties": {"type": "string", "maxLength": 63},
        },
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(),
        strict=False,
        max_length=32,
        description="Taints of nodes that the pods tolerate.",
    )


class MgmtdSpec(Placement):
    """The cluster manager."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=5,
        description="Number of services: one primary and its standbys. More than one needs "
        "metadata.etcd or metadata.postgres. Range: 1 to 5. Default: 1.",
    )
    resources: ResourceAmounts = Field(
        default=_resources("50m", "64Mi", "512Mi"), description="Resources of each service."
    )


class MetaSpec(Placement):
    """The metadata service."""

    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Number of services, each of which serves every client. More than one needs "
        "metadata.etcd or metadata.postgres. Range: 1 to 64. Default: 1.",
    )
    chunk_size: str = Field(
        default="1Mi",
        description="Size of the chunks of new files. Default: 1Mi.",
        json_schema_extra={"enum": list(_CHUNK_SIZES)},
    )
    resources: ResourceAmounts = Field(
        default=_resources("100m", "128Mi", "2Gi"), description="Resources of each service."
    )

    @model_validator(mode="after")
    def _power_of_two(self) -> Self:
        if self.chunk_size not in _CHUNK_SIZES:
            raise ValueError(f"chunkSize {self.chunk_size}: expected one of {_CHUNK_SIZES}")
        return self


class VolumeSpec(StrictModel):
    """The claims of each storage service."""

    storage_class: StorageClassName = Field(
        default="",
        description="StorageClass of the claims, preferably of local disks. If empty, the default "
        "of the cluster is used.",
    )
    size: str = Field(
        default="100Gi",
        max_length=8,
        pattern=VOLUME_SIZE,
        description="Size of the claims, which is the capacity that each disk offers. Default: "
        "100Gi.",
    )


def _fixed(field: str) -> Rule:
    return Rule(
        f"self.{field} == oldSelf.{field}",
        f"spec.storage.{field}: is immutable: create another ThreeFSCluster",
        message_expression(
            f"spec.storage.{field}: %d cannot replace %d, with which chains were created: create "
            "another ThreeFSCluster",
            f"self.{field}",
            f"oldSelf.{field}",
        ),
        f".{field}",
    )


class StorageSpec(Placement):
    """The storage services, one on a node of Kubernetes."""

    replicas: int = Field(
        default=3,
        ge=1,
        le=STORAGE_MAX,
        description="Number of storage services. Added ones get a share of the chunks; those with "
        "the highest ordinals are drained before they are removed. Range: 1 to 1000. Default: 3.",
    )
    replication: int = Field(
        default=3,
        ge=1,
        le=8,
        description="Number of replicas of every chunk; at most the number of storage services. "
        "Immutable. Range: 1 to 8. Default: 3.",
    )
    chains_per_node: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Number of chains whose head is on one disk. Immutable. Range: 1 to 64. "
        "Default: 4.",
    )
    disks: int = Field(
        default=1,
        ge=1,
        le=DISKS_MAX,
        description="Number of disks of each storage service, each with a claim. Immutable. Range: "
        "1 to 64. Default: 1.",
    )
    volume: VolumeSpec = Field(default=VolumeSpec(), description="Claim of each disk. Immutable.")
    resources: ResourceAmounts = Field(
        default=_resources("200m", "256Mi", "4Gi"), description="Resources of each service."
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.replication <= self.replicas",
                "spec.storage.replicas: is less than replication: raise it, the replicas of a "
                "chunk are on different services",
                message_expression(
                    "spec.storage.replicas: %d is less than replication %d: raise it, the "
                    "replicas of a chunk are on different services",
                    "self.replicas",
                    "self.replication",
                ),
                ".replicas",
            ),
            _fixed("replication"),
            _fixed("chainsPerNode"),
            Rule(
                "self.disks == oldSelf.disks",
                "spec.storage.disks: is immutable, as the claims of a StatefulSet are: create "
                "another ThreeFSCluster",
                "",
                ".disks",
            ),
            Rule(
                "self.volume == oldSelf.volume",
                "spec.storage.volume: is immutable, as the claims of a StatefulSet are: create "
                "another ThreeFSCluster",
                "",
                ".volume",
            ),
        )
    )

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.replicas < self.replication:
            raise ValueError(
                f"replicas {self.replicas} is less than replication {self.replication}: raise it"
            )
        return self


class TlsSpec(StrictModel):
    """TLS 1.3 for all connections of 3FS."""

    enabled: bool = Field(
        default=False, description="Whether services connect with TLS and require it."
    )
    transition: bool = Field(
        default=False,
        description="Whether services accept connections with and without TLS, for a change of "
        "enabled while clients are connected.",
    )


class ThreeFSClusterSpec(StrictModel):
    """Desired services of a 3FS."""

    image: str = Field(
        min_length=1,
        max_length=512,
        pattern=r"^[-A-Za-z0-9._:/@]+$",
        description="Image of the services with a tag or a digest. A change upgrades the pods one "
        "at a time while all replicas are healthy.",
    )
    image_pull_secrets: tuple[str, ...] = Field(
        default=(),
        strict=False,
        max_length=8,
        description="Names of Secrets with the credentials of the registry.",
        json_schema_extra={
            **list_set(), "items": {"type": "string", "maxLength": 253, "pattern": SUBDOMAIN},
        },
    )  # fmt: skip
    key_secret: str = Field(
        default="threefs-key",
        max_length=253,
        pattern=SUBDOMAIN,
        description="Secret with the key of the cluster in key. The operator neither creates nor "
        "reads it. Default: threefs-key.",
    )
    priority_class_name: str = Field(
        default="",
        max_length=253,
        pattern=rf"{SUBDOMAIN}|^$",
        description="PriorityClass of the pods. If empty, they have the default priority.",
    )
    metadata: MetadataStore = Field(
        description="Store of the rows of mgmtd and meta: etcd, PostgreSQL, or embedded on volumes."
    )
    mgmtd: MgmtdSpec = Field(default=MgmtdSpec(), description="Cluster manager of the 3FS.")
    meta: MetaSpec = Field(default=MetaSpec(), description="Metadata service of the 3FS.")
    storage: StorageSpec = Field(
        default=StorageSpec(), description="Storage services and the replication of chunks."
    )
    tls: TlsSpec = Field(default=TlsSpec(), description="TLS of all connections of the 3FS.")
    deletion_policy: Annotated[DeletionPolicy, Field(strict=False)] = Field(
        default=DeletionPolicy.RETAIN,
        description="Whether the claims, and the data on them, are kept when the ThreeFSCluster "
        "is deleted (Retain) or deleted too (Delete). After a change, wait until the condition "
        "Progressing is False before the deletion. Default: Retain.",
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.metadata.embedded) || "
                "(self.mgmtd.replicas == 1 && self.meta.replicas == 1)",
                "spec.metadata.embedded: is used by one mgmtd and one meta: set mgmtd.replicas and "
                "meta.replicas to 1, or use etcd or postgres",
                "",
                ".metadata.embedded",
            ),
        )
    )

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if self.metadata.embedded and (self.mgmtd.replicas, self.meta.replicas) != (1, 1):
            raise ValueError(
                "metadata.embedded permits one mgmtd and one meta: use etcd or postgres"
            )
        return self


NAME_RULE = Rule(
    "self.metadata.name.size() <= 63 && self.metadata.name.matches("
    "'^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$')",
    "metadata.name: must be at most 63 characters: it is the value of a label",
    message_expression(
        "metadata.name: %s (%d characters) must be at most 63 characters: it is the value of a "
        "label",
        "self.metadata.name",
        "self.metadata.name.size()",
    ),
)


class ClusterName(ObjectMeta):
    """Metadata of a ThreeFSCluster, whose name is the value of a label."""

    name: str = Field(pattern=LABEL_VALUE, max_length=63)


class ThreeFSCluster(StrictModel):
    """Services of a 3FS that the operator creates, upgrades, extends and drains."""

    api_version: Literal["fireflyer.dev/v1alpha1"] = API_VERSION
    kind: Literal["ThreeFSCluster"] = KIND_THREEFS
    metadata: ClusterName
    spec: ThreeFSClusterSpec
    status: ThreeFSClusterStatus | None = None


__all__ = [
    "NAME_RULE",
    "DeletionPolicy",
    "MetaSpec",
    "MgmtdSpec",
    "Placement",
    "ResourceAmounts",
    "StorageSpec",
    "ThreeFSCluster",
    "ThreeFSClusterSpec",
]
