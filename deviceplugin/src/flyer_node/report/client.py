"""Writes the node's NodeHealth: the standard library's HTTP client in a thread, with deadlines.

It makes only three calls, so it needs no client library, which keeps the agent small. The token is
read for each call, because the kubelet renews it.
"""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from flyer_node.errors import NodeAgentError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ApiError", "NodeHealthClient"]

GROUP_VERSION = "fireflyer.dev/v1alpha1"
FOLDER = f"/apis/{GROUP_VERSION}/nodehealths"
FIELD_MANAGER = "flyer-node"
EVENTS = "/api/v1/namespaces/default/events"
"""Namespace of Node events: Nodes are cluster-scoped."""
CALL_SECONDS = 10.0
BODY_BYTES_MAX = 4 << 20


class ApiError(NodeAgentError):
    """The API server refused or could not be reached; `status` is 0 for the latter."""

    def __init__(self, status: int, call: str, message: str) -> None:
        self.status = status
        super().__init__(f"{call}: {message}" + (f" (HTTP {status})" if status else ""))


@dataclass(frozen=True, slots=True)
class NodeHealthClient:
    """Calls about one node's object. All methods block for up to CALL_SECONDS per call."""

    server: str
    token_file: Path
    ca_file: Path
    node: str

    def write(self, status: dict[str, Any]) -> None:
        """Replaces the status; creates the object first if it does not exist."""
        try:
            self._apply_status(status)
        except ApiError as error:
            if error.status != http.client.NOT_FOUND:
                raise
            self._create()
            self._apply_status(status)

    def post_event(self, name: str, reason: str, text: str, stamp: str, *, warning: bool) -> None:
        """Creates an Event about the node."""
        document = _event(self.node, name, reason, text, stamp, warning=warning)
        self._call("POST", EVENTS, document)

    def update_event(self, name: str, fields: dict[str, Any]) -> None:
        """Changes fields of an Event."""
        kind = "application/merge-patch+json"
        self._call("PATCH", f"{EVENTS}/{quote(name)}", fields, kind)

    def _apply_status(self, status: dict[str, Any]) -> None:
        document = self._document() | {"status": status}
        path = f"{FOLDER}/{quote(self.node)}/status?fieldManager={FIELD_MANAGER}&force=true"
        self._call("PATCH", path, document, "application/apply-patch+yaml")

    def _create(self) -> None:
        """Creates the NodeHealth, owned by its node."""
        document = self._document()
        try:
            node = self._call("GET", f"/api/v1/nodes/{quote(self.node)}")
        except ApiError as error:
            if error.status not in (http.client.NOT_FOUND, http.client.FORBIDDEN):
                raise
        else:
            owner = {"apiVersion": "v1", "kind": "Node", "name": self.node}
            document["metadata"]["ownerReferences"] = [owner | {"uid": node["metadata"]["uid"]}]
        try:
            self._call("POST", f"{FOLDER}?fieldManager={FIELD_MANAGER}", document)
        except ApiError as error:
            if error.status != http.client.CONFLICT:
                raise

    def _document(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": self.node}
        return {"apiVersion": GROUP_VERSION, "kind": "NodeHealth", "metadata": metadata}

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        request_name = f"{method} {path.partition('?')[0]}"
        headers = {"Accept": "application/json", "Content-Type": content_type}
        try:
            if self.token_file.exists():
                headers["Authorization"] = f"Bearer {self.token_file.read_text().strip()}"
            connection = self._connection()
            try:
                text = None if body is None else json.dumps(body)
                connection.request(method, path, text, headers)
                response = connection.getresponse()
                raw = response.read(BODY_BYTES_MAX)
            finally:
                connection.close()
            answer = json.loads(raw) if raw else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(0, request_name, f"{type(error).__name__}: {error}") from error
        if response.status >= http.client.BAD_REQUEST:
            raise ApiError(response.status, request_name, str(answer.get("message", answer))[:500])
        return answer

    def _connection(self) -> http.client.HTTPConnection:
        where = urlsplit(self.server)
        host = where.hostname or ""
        if where.scheme == "http":
            return http.client.HTTPConnection(host, where.port, timeout=CALL_SECONDS)
        context = ssl.create_default_context(cafile=str(self.ca_file))
        return http.client.HTTPSConnection(host, where.port, timeout=CALL_SECONDS, context=context)


def _event(node: str, name: str, reason: str, text: str, stamp: str, *, warning: bool) -> Any:
    """The Event. Like the kubelet's events it has the node's name as its uid, too."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node},
        "related": {"apiVersion": "fireflyer.dev/v1alpha1", "kind": "NodeHealth", "name": node},
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": text,
        "source": {"component": "flyer-node", "host": node},
        "reportingComponent": "fireflyer.dev/flyer-node",
        "reportingInstance": node,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
