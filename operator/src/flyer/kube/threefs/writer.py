"""Writes the objects of ThreeFSClusters: creates missing ones, and updates changed ones."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.apiserver.errors import AlreadyExistsError
from flyer.kube.apiserver.resources import (
    BUDGETS,
    CONFIGMAPS,
    SERVICEACCOUNTS,
    SERVICES,
    STATEFULSETS,
)
from flyer.kube.threefs.names import KINDS
from flyer.kube.threefs.objects import conflict, first_size, small_objects, stateful_set, written
from flyer.kube.threefs.observer import find

if TYPE_CHECKING:
    from collections.abc import Collection

    from flyer.api import ThreeFSCluster
    from flyer.kube.apiserver import Api
    from flyer.kube.threefs.health import Health
    from flyer.kube.threefs.settings import ClusterSettings

__all__ = ["ConflictingObjectError", "Writer"]

Object = dict[str, Any]

CHECK_SECONDS: Final = 60.0
"""Time between checks of objects other than StatefulSets, unless the specification changes."""
_RESOURCES: Final = {
    "ServiceAccount": SERVICEACCOUNTS,
    "ConfigMap": CONFIGMAPS,
    "Service": SERVICES,
    "PodDisruptionBudget": BUDGETS,
}


class ConflictingObjectError(Exception):
    """An object of the cluster's names belongs to something else."""


class Writer:
    """Writes the objects of all clusters of one term."""

    def __init__(self, api: Api, settings: ClusterSettings) -> None:
        self._api = api
        self._settings = settings
        self._checked: dict[str, tuple[int | None, float]] = {}

    def forget_all_but(self, uids: Collection[str]) -> None:
        """Forget clusters that no longer exist."""
        self._checked = {uid: seen for uid, seen in self._checked.items() if uid in uids}

    async def write_small_objects(self, cluster: ThreeFSCluster) -> None:
        """Write the objects other than StatefulSets, if they may have changed."""
        uid, generation = str(cluster.metadata.uid), cluster.metadata.generation
        seen = self._checked.get(uid)
        if (
            seen is not None
            and seen[0] == generation
            and time.monotonic() - seen[1] < CHECK_SECONDS
        ):
            return
        for wanted in small_objects(cluster, self._settings):
            resource, meta = _RESOURCES[wanted["kind"]], wanted["metadata"]
            stored = await find(self._api, resource, meta["name"], meta["namespace"])
            if stored is None:
                await self._create(resource, wanted)
                continue
            stored = {**stored, "kind": wanted["kind"]}
            self._check_one(cluster, stored)
            changed = written(stored, wanted)
            if changed is not None:
                await self._api.replace(resource, changed)
        self._checked[uid] = generation, time.monotonic()

    def check(self, cluster: ThreeFSCluster, sets: dict[str, Object | None]) -> None:
        """Raise ConflictingObjectError for a StatefulSet that cannot become the cluster's."""
        for stored in sets.values():
            if stored is not None:
                self._check_one(cluster, {**stored, "kind": "StatefulSet"})

    async def write_sets(
        self,
        cluster: ThreeFSCluster,
        sets: dict[str, Object | None],
        replicas: dict[str, int],
        health: Health | None,
    ) -> list[str]:
        """Write the StatefulSets that have to change; their services."""
        first = first_size(sets["mgmtd"], cluster, health)
        settings = replace(self._settings, first_storage_nodes=first)
        changes = []
        for kind in KINDS:
            wanted, stored = stateful_set(cluster, kind, replicas[kind], settings), sets[kind]
            if stored is None:
                await self._create(STATEFULSETS, wanted)
                changes.append(kind)
                continue
            changed = written({**stored, "kind": "StatefulSet"}, wanted)
            if changed is not None:
                await self._api.replace(STATEFULSETS, {**changed, "apiVersion": "apps/v1"})
                changes.append(kind)
        return changes

    async def _create(self, resource: Any, wanted: Object) -> None:
        try:
            await self._api.create(resource, wanted, wanted["metadata"]["namespace"])
        except AlreadyExistsError:
            return  # by an earlier try, or by another writer: the next step compares it

    def _check_one(self, cluster: ThreeFSCluster, stored: Object) -> None:
        if why := conflict(cluster, stored):
            raise ConflictingObjectError(why)
