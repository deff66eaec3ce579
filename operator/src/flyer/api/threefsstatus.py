"""Observed state of a ThreeFSCluster."""

# ruff: noqa: TC001 - pydantic resolves the annotations

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from flyer.api.base import Model
from flyer.api.conditions import Conditions
from flyer.api.rules import list_map, list_set


class ClusterPhase(StrEnum):
    """Summary of the conditions of a ThreeFSCluster."""

    CREATING = "Creating"
    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    BLOCKED = "Blocked"


class StorageState(StrEnum):
    """State of one storage service."""

    STARTING = "Starting"
    SERVING = "Serving"
    DRAINING = "Draining"
    DRAINED = "Drained"
    REPLACING = "Replacing"
    FAILED = "Failed"


class ServiceCount(Model):
    """Numbers of the pods of one service."""

    replicas: int = Field(ge=0, description="Number of pods that the service has at present.")
    ready: int = Field(ge=0, description="Number of pods that are ready.")
    updated: int = Field(
        ge=0,
        description="Number of pods of the latest specification. 0 until the StatefulSet "
        "controller has observed it.",
    )


class ChainCount(Model):
    """Numbers of chains by their health."""

    whole: int = Field(ge=0, description="Number of chains of which all replicas serve.")
    degraded: int = Field(ge=0, description="Number of chains of which a replica is missing.")
    unavailable: int = Field(ge=0, description="Number of chains of which no replica serves.")


class StorageNode(Model):
    """One storage service."""

    name: str = Field(max_length=63, description="Name of the pod of the storage service.")
    state: Annotated[StorageState, Field(strict=False)] = Field(
        description="State of the service. Starting: its pod is not ready. Serving: it is ready. "
        "Draining: replicas move away. Drained: none is left. Replacing: it gets another claim. "
        "Failed: its container does not run."
    )
    replicas: int = Field(ge=0, description="Number of replicas of chains that are on the service.")
    message: str = Field(
        default="", max_length=1024, description="Reason of a state other than Serving."
    )


class ThreeFSClusterStatus(Model):
    """Observed state: services, chains, capacity and the progress of changes."""

    phase: Annotated[ClusterPhase, Field(strict=False)] = Field(
        default=ClusterPhase.CREATING,
        description="Summary of the conditions. Blocked: an administrator has to act.",
    )
    ready: str = Field(
        default="",
        max_length=32,
        description="Number of ready pods of all services, of the number of pods desired.",
    )
    capacity: str = Field(
        default="",
        max_length=32,
        description="Capacity of the storage services in total, replicas included.",
    )
    used: str = Field(
        default="", max_length=32, description="Used part of the capacity, replicas included."
    )
    version: str = Field(
        default="",
        max_length=512,
        description="Tag or digest of the image that every pod runs. During an upgrade it is the "
        "previous one.",
    )
    mgmtd: ServiceCount | None = Field(default=None, description="Pods of the cluster manager.")
    meta: ServiceCount | None = Field(default=None, description="Pods of the metadata service.")
    storage: ServiceCount | None = Field(default=None, description="Pods of storage services.")
    chains: ChainCount | None = Field(
        default=None, description="Health of the chains. Absent while mgmtd does not respond."
    )
    storage_nodes: tuple[StorageNode, ...] = Field(
        default=(),
        max_length=1_000,
        description="State of each storage service.",
        json_schema_extra=list_map("name"),
    )
    reserved: tuple[str, ...] = Field(
        default=(),
        max_length=16,
        description="What no other ThreeFSCluster can use: the namespace, and where the rows are "
        "in etcd or PostgreSQL. It stays while a changed specification is refused.",
        json_schema_extra={**list_set(), "items": {"type": "string", "maxLength": 500}},
    )
    conditions: Conditions = ()
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this status describes."
    )


__all__ = [
    "ChainCount",
    "ClusterPhase",
    "ServiceCount",
    "StorageNode",
    "StorageState",
    "ThreeFSClusterStatus",
]
