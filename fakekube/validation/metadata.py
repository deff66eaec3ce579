"""Validation of object metadata, with the API server's messages."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["metadata_errors", "type_error"]

_ANNOTATIONS_BYTES_MAX: Final = 256 * 1024
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_NAME: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_TYPES: Final[dict[str, type]] = {
    "name": str, "generateName": str, "namespace": str, "uid": str, "resourceVersion": str,
    "labels": dict, "annotations": dict, "ownerReferences": list, "finalizers": list,
}  # fmt: skip
_OWNER_TYPES: Final[dict[str, type]] = {
    "apiVersion": str, "kind": str, "name": str, "uid": str, "controller": bool,
    "blockOwnerDeletion": bool,
}  # fmt: skip


def type_error(metadata: Any) -> str:
    """Why this cannot be decoded as metadata (400); empty: it can."""
    if not isinstance(metadata, dict):
        return "metadata: expected an object"
    for name, kind in _TYPES.items():
        if metadata.get(name) is not None and not isinstance(metadata[name], kind):
            return f"metadata.{name}: cannot unmarshal into {kind.__name__}"
    for name in ("labels", "annotations"):
        for key, item in (metadata.get(name) or {}).items():
            if not isinstance(item, str):
                return f"metadata.{name}[{key}]: cannot unmarshal into str"
    if not all(isinstance(finalizer, str) for finalizer in metadata.get("finalizers") or ()):
        return "metadata.finalizers: cannot unmarshal into str"
    for owner in metadata.get("ownerReferences") or ():
        if not isinstance(owner, dict):
            return "metadata.ownerReferences: cannot unmarshal into OwnerReference"
        for name, expected in _OWNER_TYPES.items():
            if owner.get(name) is not None and not isinstance(owner[name], expected):
                return f"metadata.ownerReferences.{name}: cannot unmarshal into {expected.__name__}"
    return ""


def metadata_errors(metadata: dict[str, Any], *, names_label: bool = False) -> Iterator[str]:
    """Errors (422) of metadata with valid types."""
    name = metadata.get("name", "")
    pattern, longest = (_LABEL, 63) if names_label else (_SUBDOMAIN, 253)
    if not pattern.fullmatch(name) or len(name) > longest:
        kind = "label" if names_label else "subdomain"
        yield f"metadata.name: Invalid value: {json.dumps(name)}: a lowercase RFC 1123 {kind}"
    for key, value in (metadata.get("labels") or {}).items():
        if not _qualified(key):
            yield f"metadata.labels: Invalid value: {json.dumps(key)}: name part must consist of"
        if value and (len(value) > 63 or not _NAME.fullmatch(value)):
            yield f"metadata.labels: Invalid value: {json.dumps(value)}: a valid label must be"
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        if not _qualified(key.lower()):
            yield f"metadata.annotations: Invalid value: {json.dumps(key)}: name part must"
    size = sum(len(key.encode()) + len(item.encode()) for key, item in annotations.items())
    if size > _ANNOTATIONS_BYTES_MAX:
        yield f"metadata.annotations: Too long: may not be more than {_ANNOTATIONS_BYTES_MAX} bytes"
    for finalizer in metadata.get("finalizers") or ():
        if not _qualified(finalizer):
            yield f"metadata.finalizers: Invalid value: {json.dumps(finalizer)}: name part must"
    yield from _owner_errors(metadata.get("ownerReferences") or ())


def _owner_errors(owners: Any) -> Iterator[str]:
    controllers = [item for item in owners if item.get("controller")]
    if len(controllers) > 1:
        yield (
            "metadata.ownerReferences: Invalid value: only one reference can have Controller set "
            "to true"
        )
    for owner in owners:
        version = owner.get("apiVersion") or ""
        if not re.fullmatch(r"([^/]+/)?[^/]+", version):
            yield "metadata.ownerReferences.apiVersion: Invalid value: version must not be empty"
        for name in ("kind", "name", "uid"):
            if not owner.get(name):
                yield f'metadata.ownerReferences.{name}: Invalid value: "": must not be empty'


def _qualified(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (not _SUBDOMAIN.fullmatch(prefix) or len(prefix) > 253):
        return False
    return bool(_NAME.fullmatch(name)) and len(name) <= 63
