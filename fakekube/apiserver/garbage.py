"""Garbage collector and namespace controller of the in-memory cluster, run on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fakekube.apiserver.store import Store

__all__ = ["collect_garbage"]


def collect_garbage(store: Store) -> int:
    """Delete objects without their owner or in a terminating namespace. Returns their number."""
    uids = {
        entry.object["metadata"]["uid"]
        for table in store.tables.values()
        for entry in table.entries.values()
    }
    ending = {
        namespace["metadata"]["name"]
        for namespace in store.all("namespaces")
        if "deletionTimestamp" in namespace["metadata"]
    }
    collected = 0
    for table in store.tables.values():
        for key, entry in list(table.entries.items()):
            metadata = entry.object["metadata"]
            owners = metadata.get("ownerReferences") or []
            orphan = owners and not any(owner["uid"] in uids for owner in owners)
            if (orphan or key[0] in ending) and "deletionTimestamp" not in metadata:
                store.delete(table.kind.plural, key[1], key[0])
                collected += 1
    for name in ending:
        if not any(key[0] == name for table in store.tables.values() for key in table.entries):
            store.remove(store.table("namespaces"), ("", name))
    return collected
