"""Users of a cluster other than its administrator."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from testcluster.handle import KubectlError

if TYPE_CHECKING:
    from testcluster.handle import Cluster, Manifest

__all__ = ["User", "tenant"]


@dataclass(frozen=True)
class User:
    """A user with rights in one namespace; the API server authorizes each request as this user."""

    cluster: Cluster
    name: str
    namespace: str

    def kubectl(self, *arguments: str, stdin: str = "", deadline_s: float = 60.0) -> str:
        """The output of kubectl; raises KubectlError when the request is refused."""
        identity = (f"--as={self.name}", "--as-group=system:authenticated")
        namespace = f"--namespace={self.namespace}"
        return self.cluster.kubectl(
            *identity, namespace, *arguments, stdin=stdin, deadline_s=deadline_s
        )

    def create(self, *manifests: Manifest) -> None:
        """Create these objects; unknown fields are sent unchanged."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
        self.kubectl("create", "--validate=false", "-f", "-", stdin=text, deadline_s=300)

    def get(self, kind: str, name: str) -> Any:
        """An object as parsed JSON."""
        return json.loads(self.kubectl("get", kind, name, "--output=json"))

    def refusal(self, *arguments: str, stdin: str = "") -> str:
        """The API server's message for a request that it must refuse."""
        with pytest.raises(KubectlError) as refused:
            self.kubectl(*arguments, stdin=stdin)
        assert not refused.value.unanswered, refused.value
        return refused.value.stderr

    def refusal_of(self, manifest: Manifest) -> str:
        """The API server's message for an object that it must refuse."""
        text = json.dumps(manifest)
        return self.refusal("create", "--validate=false", "-f", "-", stdin=text)


def tenant(cluster: Cluster, name: str, namespace: str) -> User:
    """A user with Kubernetes' ClusterRole `edit` in this namespace."""
    cluster.kubectl(
        *("create", "rolebinding", name, "--clusterrole=edit", f"--user={name}"),
        f"--namespace={namespace}",
    )
    return User(cluster, name, namespace)
