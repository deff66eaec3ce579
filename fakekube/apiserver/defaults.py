"""Defaults of the API server for new objects, and the grace period of deleted pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fakekube.apiserver.kinds import Kind
    from fakekube.apiserver.tables import Object

__all__ = ["complete", "grace_seconds"]

POD_GRACE_SECONDS = 30


def grace_seconds(kind: Kind, value: Object, requested: int | None) -> int:
    """Seconds until a deleted object is removed; `requested` is the grace period of the request."""
    if kind.plural != "pods":
        return 0
    over = value.get("status", {}).get("phase") in ("Succeeded", "Failed")
    if over or not value["spec"].get("nodeName"):
        return 0
    grace = value["spec"].get("terminationGracePeriodSeconds", POD_GRACE_SECONDS)
    return int(grace if requested is None else requested)


def complete(kind: Kind, value: Object) -> None:
    """Set the defaults that the operator reads."""
    if kind.plural == "pods":
        value.setdefault("spec", {}).setdefault("schedulerName", "default-scheduler")
        value["spec"].setdefault("terminationGracePeriodSeconds", POD_GRACE_SECONDS)
        value["status"] = {"phase": "Pending", **value.get("status", {})}
    if kind.plural == "namespaces":
        value["status"] = {"phase": "Active"}
