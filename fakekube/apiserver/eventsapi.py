"""API group events.k8s.io: events of the core group with other field names.

Writes are validated as by the API server; events are stored and read in the core group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fakekube.errors import ApiRefusal, invalid

if TYPE_CHECKING:
    from fakekube.apiserver.paths import ObjectPath

__all__ = ["changed", "created", "is_event", "refused"]

GROUP: Final = "events.k8s.io"
PLURAL: Final = "events"
_NAMES: Final = {
    "regarding": "involvedObject", "note": "message", "reportingController": "reportingComponent",
}  # fmt: skip
_SAME: Final = {
    "metadata", "type", "reason", "action", "eventTime", "series", "related", "reportingInstance",
}  # fmt: skip
_REQUIRED: Final = (
    "eventTime", "reportingController", "reportingInstance", "action", "reason", "type",
)  # fmt: skip
_TYPES: Final = ("Normal", "Warning")
_BYTES_MAX: Final = {"note": 1024, "reason": 128, "action": 128, "reportingInstance": 128}

Object = dict[str, Any]


def is_event(target: ObjectPath) -> bool:
    """Whether a request names events of this group."""
    return (target.group, target.plural) == (GROUP, PLURAL)


def created(value: Object) -> Object:
    """A new event in the core group's form. Raises ApiRefusal."""
    name = value.get("metadata", {}).get("name", "")
    for field in _REQUIRED:
        if not value.get(field):
            raise invalid(PLURAL, name, f"{field}: Required value")
    for field, most in _BYTES_MAX.items():
        if len(value.get(field, "").encode()) > most:
            raise invalid(
                PLURAL, name, f"{field}: Invalid value: can have at most {most} characters"
            )
    if value["type"] not in _TYPES:
        raise invalid(PLURAL, name, f"type: Invalid value: {value['type']!r}")
    unknown = value.keys() - _SAME - _NAMES.keys() - {"apiVersion", "kind"}
    if unknown:
        raise invalid(PLURAL, name, f"{min(unknown)}: Invalid value: needs to be unset")
    if value.get("regarding", {}).get("namespace") != value["metadata"].get("namespace"):
        raise invalid(PLURAL, name, "involvedObject.namespace: does not match event.namespace")
    _check_series(name, value)
    fields = {_NAMES.get(key, key): item for key, item in value.items()}
    return {**fields, "apiVersion": "v1", "kind": "Event"}


def changed(name: str, patch: Any) -> Object:
    """The merge patch of an event, of which only the series may change."""
    if not isinstance(patch, dict) or patch.keys() - {"series", "metadata"}:
        raise invalid(PLURAL, name, "fields other than series are immutable")
    _check_series(name, patch)
    return patch


def _check_series(name: str, value: Object) -> None:
    series = value.get("series")
    if series is None:
        return
    if series.get("count", 0) < 2:
        raise invalid(PLURAL, name, "series.count: Invalid value: should be at least 2")
    if not series.get("lastObservedTime"):
        raise invalid(PLURAL, name, "series.lastObservedTime: Required value")


def refused(target: ObjectPath) -> ApiRefusal:
    """Refuses the operations that this server does not implement."""
    return ApiRefusal(
        405, "MethodNotAllowed", f"{GROUP} {target.plural} are read as core events here"
    )
