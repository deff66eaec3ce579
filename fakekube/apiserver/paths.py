"""Object paths of requests."""

from __future__ import annotations

from dataclasses import dataclass

from fakekube.errors import ApiRefusal


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """A collection (without a name), an object, or a subresource."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def resource(self) -> str:
        """The resource as in RBAC rules, with its subresource."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


def parse(path: str) -> ObjectPath:
    """Parse `/api/v1/…` or `/apis/GROUP/VERSION/…`."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise ApiRefusal(404, "NotFound", f"the server could not find {path}")
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    if len(rest) > 3:
        raise ApiRefusal(404, "NotFound", f"the server could not find {path}")
    plural, name, subresource = (*rest, "", "")[:3]
    return ObjectPath(group, version, plural, namespace, name, subresource)


__all__ = ["ObjectPath", "parse"]
