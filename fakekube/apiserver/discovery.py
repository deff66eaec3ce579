"""Discovery, version and health of the in-memory API server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from fakekube.apiserver.kinds import Kind
    from fakekube.apiserver.store import Store

_VERBS: Final = ["create", "delete", "get", "list", "patch", "update", "watch"]


def discover(path: str, store: Store) -> dict[str, Any] | None:
    """The response to a path of the server itself; None: the path names objects."""
    path = path.rstrip("/")
    kinds = [table.kind for table in store.tables.values()]
    match path.split("/")[1:]:
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return _groups(kinds)
        case ["version"]:
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.3"}
        case ["healthz" | "readyz" | "livez"]:
            return {"kind": "Status", "status": "Success"}
        case ["api", "v1"]:
            return _resources("", "v1", kinds)
        case ["apis", group, version]:
            return _resources(group, version, kinds)
        case _:
            return None


def _groups(kinds: list[Kind]) -> dict[str, Any]:
    listed = []
    for group, version in sorted({(kind.group, kind.version) for kind in kinds if kind.group}):
        group_version = {"groupVersion": f"{group}/{version}", "version": version}
        listed.append(
            {"name": group, "versions": [group_version], "preferredVersion": group_version}
        )
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def _resources(group: str, version: str, kinds: list[Kind]) -> dict[str, Any]:
    resources: list[dict[str, Any]] = []
    for kind in kinds:
        if (kind.group, kind.version) != (group, version):
            continue
        fields = {"kind": kind.kind, "namespaced": kind.namespaced, "verbs": _VERBS}
        resources.append({"name": kind.plural, "singularName": kind.kind.lower(), **fields})
        if kind.status:
            resources.append({"name": f"{kind.plural}/status", "singularName": "", **fields})
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": resources,
    }


__all__ = ["discover"]
