"""The API server in memory, with the few commands by which tests prepare a real one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from flyer.kube.apiserver import Access

from fakekube.apiserver.kinds import KINDS
from fakekube.errors import ApiRefusal

if TYPE_CHECKING:
    from fakekube import ApiServer


class MemoryCluster:
    """Stands for `testcluster.handle.Cluster` in tests of policies."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self._rules: dict[str, list[dict[str, Any]]] = {}

    def access(self) -> Access:
        return Access(self.server.url)

    def apply(self, *objects: dict[str, Any], namespace: str = "") -> None:
        for manifest in objects:
            name = manifest["metadata"]["name"]
            if manifest["kind"] == "ClusterRole":
                self._rules[name] = manifest["rules"]
            elif manifest["kind"] == "ClusterRoleBinding":
                self._grant(manifest)
            else:
                plural = next(kind.plural for kind in KINDS if kind.kind == manifest["kind"])
                with contextlib.suppress(ApiRefusal):  # it is there
                    self.server.store.create(plural, manifest, namespace)

    def _grant(self, binding: dict[str, Any]) -> None:
        self.server.admission.grants |= {
            (subject["name"], resource, name, verb)
            for subject in binding["subjects"]
            for rule in self._rules[binding["roleRef"]["name"]]
            for resource in rule["resources"]
            for name in rule.get("resourceNames", ["*"])
            for verb in rule["verbs"]
        }

    def kubectl(self, command: str, target: str, *names: str) -> None:
        assert command == "delete", command
        kind, _, name = target.partition("/")
        if kind.endswith("policybinding"):
            self.server.admission.off.add(name.partition(".")[0])
        elif kind == "mutatingwebhookconfiguration":
            self.server.store.delete("mutatingwebhookconfigurations", names[0])
        elif kind == "priorityclass":
            for priority_class in names:
                self.server.store.delete("priorityclasses", priority_class)
        else:
            assert kind.startswith("clusterrole"), target
            self.server.admission.grants.clear()
