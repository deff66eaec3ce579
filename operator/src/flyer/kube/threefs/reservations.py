"""Reservations: what only one ThreeFSCluster uses, its namespace and the rows of its 3FS. Pure.

The status of a cluster has its reservations. They are stored before its first object is created,
and stay while its specification is refused: its services run, and another cluster with their rows
would destroy them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from flyer.api import ThreeFSCluster

__all__ = ["Reservations", "reservations_of"]

Object = dict[str, Any]

_NAMESPACE = "namespaces/"


@dataclass(frozen=True, slots=True)
class Reservations:
    """Decisions about all clusters, by uid."""

    refused: dict[str, str] = field(default_factory=dict)
    """Why another cluster excludes this one."""
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Locations to store as the reservations of a cluster before it continues."""


@dataclass(frozen=True, slots=True)
class _Holder:
    uid: str
    namespace: str
    name: str


class _Table:
    """Holders of locations. Two locations overlap if one is the other one, or a folder of it."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}
        self._below: dict[str, list[_Holder]] = {}

    def hold(self, location: str, holder: _Holder) -> None:
        """Register the holder, unless another one has an overlapping location."""
        if self.other(location, holder.uid) is not None:
            return
        self._holders[location] = holder
        for folder in _folders(location):
            self._below.setdefault(folder, []).append(holder)

    def other(self, location: str, uid: str) -> _Holder | None:
        """A holder other than this cluster of an overlapping location."""
        above = (self._holders.get(each) for each in (location, *_folders(location)))
        holders = itertools.chain(above, self._below.get(location, ()))
        return next((it for it in holders if it is not None and it.uid != uid), None)


def reservations_of(
    values: Iterable[Object], parsed: Mapping[str, ThreeFSCluster | str]
) -> Reservations:
    """Which clusters are refused, and what the others still have to reserve.

    Reservations come first, then older clusters; the uid decides within the same second.
    """
    ordered = sorted(values, key=_age)
    table, decisions = _Table(), Reservations()
    for value in ordered:
        for location in _reserved(value):
            table.hold(location, _holder(value))
    for value in ordered:
        holder, cluster = _holder(value), parsed[value["metadata"]["uid"]]
        if isinstance(cluster, str) or "deletionTimestamp" in value["metadata"]:
            continue
        locations = _locations(cluster)
        others = ((each, table.other(each, holder.uid)) for each in locations)
        rival = next(((each, other) for each, other in others if other is not None), None)
        if rival is not None:
            decisions.refused[holder.uid] = _why(cluster, *rival)
            continue
        for location in locations:
            table.hold(location, holder)
        if locations != _reserved(value):
            decisions.missing[holder.uid] = locations
    return decisions


def _age(value: Object) -> tuple[str, str]:
    return value["metadata"].get("creationTimestamp") or "", value["metadata"]["uid"]


def _reserved(value: Object) -> tuple[str, ...]:
    return tuple((value.get("status") or {}).get("reserved") or ())


def _holder(value: Object) -> _Holder:
    metadata = value["metadata"]
    return _Holder(metadata["uid"], metadata["namespace"], metadata["name"])


def _locations(cluster: ThreeFSCluster) -> tuple[str, ...]:
    etcd, postgres = cluster.spec.metadata.etcd, cluster.spec.metadata.postgres
    rows: list[str] = []
    if etcd is not None:
        rows = [f"{endpoint}{etcd.prefix}" for endpoint in etcd.endpoints]
    if postgres is not None:
        tables = f"{postgres.database}/{postgres.schema_}"
        rows = [f"postgresql://{host}/{tables}" for host in postgres.hosts]
    return f"{_NAMESPACE}{cluster.metadata.namespace}", *sorted(rows)


def _folders(location: str) -> Iterator[str]:
    while location := location.rpartition("/")[0]:
        yield location


def _why(cluster: ThreeFSCluster, location: str, other: _Holder) -> str:
    if location.startswith(_NAMESPACE):
        return f"the namespace has a ThreeFSCluster already, {other.name}: use another"
    name = f"{other.namespace}/{other.name}"
    etcd, postgres = cluster.spec.metadata.etcd, cluster.spec.metadata.postgres
    if etcd is not None:
        return (
            f"spec.metadata.etcd.prefix: {etcd.prefix} of these endpoints has the rows of {name}: "
            "use another prefix, such as /3fs-2"
        )
    assert postgres is not None, location
    return (
        f"spec.metadata.postgres.schema: {postgres.schema_} of this database has the rows of "
        f"{name}: use another schema, such as {postgres.schema_}_2"
    )
