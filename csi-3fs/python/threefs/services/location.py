"""Zone and rack of a storage node from the labels of its Kubernetes node.

An init container writes them to a file, so that only it needs a token of the service account.
"""

from __future__ import annotations

import http
import http.client
import json
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from threefs.cluster import write_atomically
from threefs.errors import InvalidArgument, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ACCOUNT_FOLDER", "api_server", "labels_of", "write_location"]

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS = 10.0
RESPONSE_BYTES_MAX = 8 << 20


def api_server(
    environment: Mapping[str, str], account: Path = ACCOUNT_FOLDER
) -> http.client.HTTPSConnection:
    """A connection to the API server of this pod's cluster; it is opened by the first request."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise InvalidArgument("KUBERNETES_SERVICE_HOST is not set: `locate` runs in a pod")
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    port = int(environment.get("KUBERNETES_SERVICE_PORT", "443"))
    return http.client.HTTPSConnection(host, port, timeout=REQUEST_SECONDS, context=context)


def labels_of(
    node: str, connection: http.client.HTTPConnection, account: Path = ACCOUNT_FOLDER
) -> dict[str, str]:
    """The labels of a node, read with the service account of this pod."""
    try:
        content = _get(connection, f"/api/v1/nodes/{quote(node, safe='')}", account / "token")
        document: Any = json.loads(content)
        labels = document["metadata"].get("labels") or {}
        return {str(name): str(value) for name, value in labels.items()}
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise Unavailable(
            f"the labels of node `{node}` cannot be read: {error}; the service account of the "
            "storage services needs `get` of nodes",
            who="the API server",
        ) from error
    finally:
        connection.close()


def _get(connection: http.client.HTTPConnection, path: str, token_file: Path) -> bytes:
    token = token_file.read_text().strip()
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    response = connection.getresponse()
    content = response.read(RESPONSE_BYTES_MAX)
    if response.status != http.HTTPStatus.OK:
        raise OSError(f"status {response.status}")
    return content


def write_location(file: Path, labels: Mapping[str, str], zone_label: str, rack_label: str) -> None:
    """Write zone and rack; a label that is not configured or not set leaves its part empty."""
    parts = {"zone": labels.get(zone_label, ""), "rack": labels.get(rack_label, "")}
    write_atomically(file, json.dumps(parts) + "\n")
