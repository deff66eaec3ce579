"""Object store of the in-memory API server: versions, writes, deletion, history. No I/O.

A stored object is never changed in place: a write stores a new one, so that references of watchers
and tests stay valid.
"""

from __future__ import annotations

import contextlib
import copy
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from fakekube.apiserver import patches
from fakekube.apiserver.defaults import complete, grace_seconds
from fakekube.apiserver.kinds import KINDS, Kind
from fakekube.apiserver.tables import Change, Entry, Object, Table
from fakekube.errors import ApiRefusal, conflict, expired, invalid, modified, not_found
from fakekube.validation.definitions import definition_of
from fakekube.validation.metadata import metadata_errors, type_error
from fakekube.validation.structural import as_decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Admit", "Store"]


class Admit(Protocol):
    """Admission of one write; the old or new object is None if it does not exist."""

    def mutate(self, old: Object | None, new: Object) -> Object:
        """The mutated object, before validation."""

    def validate(self, old: Object | None, new: Object | None) -> None:
        """Raise if the write is refused, after validation."""


class Store:
    """All stored objects.

    Every write validates Fire-Flyer's kinds against their CRDs, and the metadata of all objects.
    The caller provides the admission of a write (`admit`).
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.version = 0
        self.clock = clock
        self.tables = {(kind.group, kind.plural): Table(kind) for kind in KINDS}
        self._applied: dict[tuple[str, str, str, str], Object] = {}
        self._checked = True
        for name in ("default", "kube-system", "fireflyer-system"):
            self.create("namespaces", {"metadata": {"name": name}})

    # -- reading -------------------------------------------------------------------------------

    def table(self, plural: str, group: str | None = None) -> Table:
        """The table of a resource; the group may be omitted if it is unambiguous."""
        if group is not None:
            if (group, plural) not in self.tables:
                raise ApiRefusal(
                    404, "NotFound", "the server could not find the requested resource"
                )
            return self.tables[(group, plural)]
        return next(table for (_, name), table in self.tables.items() if name == plural)

    def find(self, plural: str, name: str, namespace: str = "") -> Object | None:
        """The stored object, which must not be modified."""
        entry = self.table(plural).entries.get((namespace, name))
        return entry.object if entry else None

    def get(self, plural: str, name: str, namespace: str = "") -> Object:
        """The stored object, or 404."""
        value = self.find(plural, name, namespace)
        if value is None:
            raise not_found(plural, name)
        return value

    def all(self, plural: str, namespace: str | None = None) -> list[Object]:
        """Every object, in the order of their names."""
        entries = self.table(plural).entries
        return [
            entries[key].object
            for key in sorted(entries)
            if namespace is None or key[0] == namespace
        ]

    def since(self, table: Table, version: int) -> Iterator[Change]:
        """The changes after a version. Raises 410."""
        if version < table.forgotten:
            raise expired(f"too old resource version: {version} ({table.forgotten + 1})")
        return iter([change for change in table.history if change.version > version])

    def compact(self) -> None:
        """Discard the history, as etcd does: watches of old versions get 410."""
        for table in self.tables.values():
            table.history.clear()
            table.forgotten = self.version

    # -- writing -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unchecked(self) -> Iterator[None]:
        """Writes inside are not validated, as if they were stored under an older definition."""
        self._checked = False
        try:
            yield
        finally:
            self._checked = True

    def create(
        self,
        plural: str,
        value: Object,
        namespace: str = "",
        *,
        admit: Admit | None = None,
        strict: bool = False,
        dry_run: bool = False,
    ) -> Object:
        """Store a new object. `strict` refuses unknown fields, `dry_run` stores nothing."""
        table = self.table(plural, _group(value)) if "apiVersion" in value else self.table(plural)
        kind = table.kind
        value = as_decoded(value) if self._checked else copy.deepcopy(value)
        metadata = value.setdefault("metadata", {})
        self._decodes(kind, metadata)
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise invalid(kind.plural, "", "name or generateName is required")
            metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
        if kind.namespaced:
            namespace = namespace or metadata.get("namespace", "default")
            self._namespace_takes(namespace)
            metadata["namespace"] = namespace
        if kind.status and kind.generation:
            value.pop("status", None)
        key = (namespace if kind.namespaced else "", metadata["name"])
        value = {"apiVersion": kind.api_version, "kind": kind.kind, **value}
        definition = definition_of(kind.plural, kind.group) if self._checked else None
        if definition is not None:
            definition.prune(value, strict=strict)
            definition.complete(value)
        if admit is not None:
            value = admit.mutate(None, value)
            metadata = value["metadata"]
        self._check(kind, value, None)
        if admit is not None:
            admit.validate(None, value)
        if key in table.entries:
            message = f'{kind.plural} "{key[1]}" already exists'
            raise ApiRefusal(409, "AlreadyExists", message)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = self._timestamp()
        metadata.pop("resourceVersion", None)
        metadata.pop("deletionTimestamp", None)
        if kind.generation:
            metadata["generation"] = 1
        complete(kind, value)
        return value if dry_run else self._put(table, key, None, value)

    def replace(
        self,
        plural: str,
        name: str,
        value: Object,
        namespace: str = "",
        subresource: str = "",
        *,
        admit: Admit | None = None,
    ) -> Object:
        """Store another version (PUT)."""
        table, key = self.table(plural, _group(value)), (namespace, name)
        before = self._entry(table, key)
        version = value.get("metadata", {}).get("resourceVersion")
        if version and version != before.object["metadata"]["resourceVersion"]:
            raise modified(plural, name)
        return self._write(table, key, before, as_decoded(value), subresource, admit)

    def patch(
        self,
        plural: str,
        name: str,
        patch: Any,
        namespace: str = "",
        subresource: str = "",
        *,
        kind: str = patches.MERGE,
        manager: str = "",
        group: str | None = None,
        admit: Admit | None = None,
    ) -> Object:
        """Store a patched version."""
        table, key = self.table(plural, group), (namespace, name)
        if kind == patches.APPLY and key not in table.entries and not subresource:
            metadata = {**patch.get("metadata", {}), "name": name}
            value = {**patch, "metadata": metadata}
            created = self.create(plural, value, namespace, admit=admit)
            self._applied[(manager, table.kind.group + plural, *key)] = patch
            return created
        before = self._entry(table, key)
        if kind == patches.JSON:
            value = patches.json_patch(before.object, patch)
        elif kind == patches.APPLY:
            mark = (manager, table.kind.group + plural + subresource, *key)
            value = patches.apply(
                before.object, patches.without_version(patch), self._applied.get(mark)
            )
            self._guard(before, patch, plural, name)
            self._applied[mark] = patch
        else:
            self._guard(before, patch, plural, name)
            function = patches.strategic if kind == patches.STRATEGIC else patches.merge
            value = function(before.object, patches.without_version(patch))
        return self._write(table, key, before, as_decoded(value), subresource, admit)

    def delete(
        self,
        plural: str,
        name: str,
        namespace: str = "",
        options: Object | None = None,
        *,
        admit: Admit | None = None,
    ) -> Object:
        """Delete the object, or mark it: finalizers and the grace period of pods delay deletion."""
        options = options or {}
        table, key = self.table(plural), (namespace, name)
        before = self._entry(table, key)
        metadata = before.object["metadata"]
        preconditions = options.get("preconditions") or {}
        for field_name in ("uid", "resourceVersion"):
            if preconditions.get(field_name) not in (None, metadata.get(field_name)):
                raise conflict(plural, name, f"the {field_name} in the precondition does not match")
        if admit is not None:
            admit.validate(before.object, None)
        grace = grace_seconds(table.kind, before.object, options.get("gracePeriodSeconds"))
        stays = metadata.get("finalizers") or grace > 0 or table.kind.plural == "namespaces"
        if not stays:
            return self.remove(table, key)
        already = metadata.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" in metadata and (already is None or already <= grace):
            return before.object
        value = copy.deepcopy(before.object)
        value["metadata"]["deletionTimestamp"] = self._timestamp(grace)
        if table.kind.plural == "pods":
            value["metadata"]["deletionGracePeriodSeconds"] = grace
        if table.kind.plural == "namespaces":
            value["status"] = {"phase": "Terminating"}
        return self._put(table, key, before, value)

    def bind(self, namespace: str, name: str, binding: Object) -> None:
        """The Binding subresource of pods."""
        table, key = self.table("pods", ""), (namespace, name)
        before = self._entry(table, key)
        uid = binding.get("metadata", {}).get("uid")
        if uid and uid != before.object["metadata"]["uid"]:
            raise conflict("pods/binding", name, "the uid in the precondition does not match")
        spec = before.object["spec"]
        if "deletionTimestamp" in before.object["metadata"]:
            raise conflict("pods/binding", name, f"pod {name} is being deleted, cannot be assigned")
        if spec.get("nodeName"):
            assigned = f"pod {name} is already assigned to node {spec['nodeName']!r}"
            raise conflict("pods/binding", name, assigned)
        if spec.get("schedulingGates"):
            raise conflict("pods/binding", name, f"pod {name} has non-empty .spec.schedulingGates")
        value = copy.deepcopy(before.object)
        value["spec"]["nodeName"] = binding["target"]["name"]
        value["status"].setdefault("conditions", []).append(
            {"type": "PodScheduled", "status": "True"}
        )
        self._put(table, key, before, value)

    def remove(self, table: Table, key: tuple[str, str]) -> Object:
        """Remove an object immediately, ignoring its finalizers. Returns its last version."""
        before = table.entries.pop(key)
        self.version += 1
        metadata = {**before.object["metadata"], "resourceVersion": str(self.version)}
        entry = Entry({**before.object, "metadata": metadata}, self.version)
        self._record(table, Change(self.version, True, before, entry))
        return entry.object

    # -- inside --------------------------------------------------------------------------------

    def _entry(self, table: Table, key: tuple[str, str]) -> Entry:
        entry = table.entries.get(key)
        if entry is None:
            raise not_found(table.kind.plural, key[1])
        return entry

    def _guard(self, before: Entry, patch: Object, plural: str, name: str) -> None:
        metadata = patch.get("metadata") or {}
        version = metadata.get("resourceVersion")
        if version and version != before.object["metadata"]["resourceVersion"]:
            raise modified(plural, name)
        uid = metadata.get("uid")
        if uid and uid != before.object["metadata"]["uid"]:
            raise conflict(plural, name, f"Precondition failed: UID in precondition: {uid}")

    def _decodes(self, kind: Kind, metadata: Any) -> None:
        if self._checked and (why := type_error(metadata)):
            subject = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}'
            raise ApiRefusal(400, "BadRequest", f"{subject}: {why}")

    def _check(self, kind: Kind, value: Object, old: Object | None) -> None:
        if not self._checked:
            return
        metadata = value["metadata"]
        if old is None or metadata != old["metadata"]:
            errors = list(metadata_errors(metadata, names_label=kind.plural == "namespaces"))
            if errors:
                raise invalid(kind.plural, metadata["name"], ", ".join(errors))
        definition = definition_of(kind.plural, kind.group)
        if definition is not None:
            definition.check(value, old)

    def _write(
        self,
        table: Table,
        key: tuple[str, str],
        before: Entry,
        value: Object,
        subresource: str,
        admit: Admit | None,
    ) -> Object:
        kind, old = table.kind, before.object
        self._decodes(kind, value.get("metadata"))
        definition = definition_of(kind.plural, kind.group) if self._checked else None
        if definition is not None:
            definition.prune(value)
            definition.complete(value)
        if subresource == "status":
            status = {"status": value["status"]} if "status" in value else {}
            if definition is None:
                status = status or {"status": {}}
            value = {name: item for name, item in old.items() if name != "status"} | status
        elif kind.status and kind.generation:
            value.pop("status", None)
            if "status" in old:
                value["status"] = old["status"]
        fixed_fields = (
            "uid",
            "creationTimestamp",
            "resourceVersion",
            "generation",
            "deletionTimestamp",
        )
        metadata = {
            name: item for name, item in value["metadata"].items() if name not in fixed_fields
        }
        metadata |= {
            name: old["metadata"][name] for name in fixed_fields if name in old["metadata"]
        }
        if kind.generation and subresource != "status" and _spec(value) != _spec(old):
            metadata["generation"] = old["metadata"].get("generation", 0) + 1
        value = {**value, "metadata": metadata}
        if admit is not None:
            value = admit.mutate(old, value)
        self._check(kind, value, old)
        if admit is not None:
            admit.validate(old, value)
        if value == old:
            return old
        is_complete = (
            "deletionTimestamp" in metadata
            and not metadata.get("finalizers")
            and old["metadata"].get("finalizers")
        )
        return self.remove(table, key) if is_complete else self._put(table, key, before, value)

    def _put(
        self, table: Table, key: tuple[str, str], before: Entry | None, value: Object
    ) -> Object:
        for check in table.checks:
            why = check(before.object if before else None, value)
            if why:
                raise invalid(table.kind.plural, key[1], why)
        self.version += 1
        value["metadata"]["resourceVersion"] = str(self.version)
        entry = Entry(value, self.version)
        table.entries[key] = entry
        self._record(table, Change(self.version, False, before, entry))
        return value

    def _record(self, table: Table, change: Change) -> None:
        if len(table.history) == table.history.maxlen:
            table.forgotten = table.history[0].version
        table.history.append(change)
        for watcher in list(table.watchers):
            watcher(change)

    def _namespace_takes(self, name: str) -> None:
        namespace = self.find("namespaces", name)
        if namespace is None:
            raise not_found("namespaces", name)
        if "deletionTimestamp" in namespace["metadata"]:
            why = f"unable to create new content in namespace {name} because it is being terminated"
            raise ApiRefusal(403, "Forbidden", why)

    def _timestamp(self, later_seconds: float = 0) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.clock() + later_seconds))


def _group(value: Object) -> str | None:
    version = value.get("apiVersion")
    if version is None:
        return None
    return version.rpartition("/")[0] if isinstance(version, str) else None


def _spec(value: Object) -> Object:
    return {name: item for name, item in value.items() if name not in ("metadata", "status")}
