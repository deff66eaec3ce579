"""Requests of the issuer to the API server: four read requests, each with a deadline.

They use `http.client`: the driver sends no other request to Kubernetes, so its image needs no
Kubernetes client.
"""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote

from threefs.csi.errors import Unreachable
from threefs.csi.tickets.review import (
    AUDIENCE,
    Claim,
    ClaimName,
    PersistentVolume,
    Pod,
    TokenIdentity,
)

__all__ = ["ApiServer"]

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS = 5.0
RESPONSE_BYTES_MAX = 8 << 20
"""Larger than any object that the API server stores."""
TOKEN_BYTES_MAX = 16 << 10
ACCOUNT_PREFIX = "system:serviceaccount:"
POD_NAME = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"
OK = range(200, 300)


class ApiServer:
    """Implements `review.Kubernetes`; thread-safe, one connection per request."""

    def __init__(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        token_file: Path = ACCOUNT_FOLDER / "token",
    ) -> None:
        self._host = host
        self._port = port
        self._context = context
        self._token_file = token_file

    @classmethod
    def in_cluster(cls, host: str, port: int) -> ApiServer:
        """Connect as the pod's service account."""
        context = ssl.create_default_context(cafile=str(ACCOUNT_FOLDER / "ca.crt"))
        return cls(host, port, context)

    def token(self, token: str) -> TokenIdentity | None:
        """See `review.Kubernetes`."""
        if not 0 < len(token) <= TOKEN_BYTES_MAX:
            return None
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        review = self._request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", body)
        status = (review or {}).get("status") or {}
        # An API server without audience support accepts a token for any audience, and names none.
        accepted = status.get("authenticated") is True
        if not accepted or AUDIENCE not in (status.get("audiences") or ()):
            return None
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        account = str(user.get("username", ""))
        if not account.startswith(ACCOUNT_PREFIX):
            return None
        namespace, _, name = account.removeprefix(ACCOUNT_PREFIX).partition(":")
        return TokenIdentity(
            namespace, name, _first(extra.get(POD_NAME)), _first(extra.get(POD_UID))
        )

    def pod(self, namespace: str, name: str) -> Pod | None:
        """See `review.Kubernetes`."""
        response = self._request("GET", f"/api/v1/namespaces/{_part(namespace)}/pods/{_part(name)}")
        if response is None:
            return None
        spec = response.get("spec") or {}
        claims = []
        for volume in spec.get("volumes") or ():
            if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
                claims.append(ClaimName(str(claim)))
            elif volume.get("ephemeral") is not None:
                claims.append(ClaimName(f"{name}-{volume.get('name')}", ephemeral=True))
        phase = str((response.get("status") or {}).get("phase", ""))
        return Pod(_uid(response), str(spec.get("nodeName", "")), phase, tuple(claims))

    def claim(self, namespace: str, name: str) -> Claim | None:
        """See `review.Kubernetes`."""
        path = f"/api/v1/namespaces/{_part(namespace)}/persistentvolumeclaims/{_part(name)}"
        response = self._request("GET", path)
        if response is None:
            return None
        owners = response["metadata"].get("ownerReferences") or ()
        owner = next((str(ref.get("uid")) for ref in owners if ref.get("controller")), "")
        return Claim(_uid(response), str((response.get("spec") or {}).get("volumeName", "")), owner)

    def volume(self, name: str) -> PersistentVolume | None:
        """See `review.Kubernetes`."""
        response = self._request("GET", f"/api/v1/persistentvolumes/{_part(name)}")
        if response is None:
            return None
        spec = response.get("spec") or {}
        source = spec.get("csi") or {}
        modes = spec.get("accessModes") or []
        return PersistentVolume(
            str(source.get("driver", "")),
            str(source.get("volumeHandle", "")),
            str((spec.get("claimRef") or {}).get("uid", "")),
            bool(modes) and set(modes) == {"ReadOnlyMany"},
        )

    def _request(self, method: str, path: str, body: object = None) -> dict[str, Any] | None:
        """Return the object, or None if it does not exist."""
        try:
            status, text = self._exchange(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the API server does not answer {method} {path}: {error}") from error
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        if status not in OK:
            raise Unreachable(
                f"the API server returned {status} for {method} {path}; does the service account "
                "threefs-csi-controller have its ClusterRole?"
            )
        try:
            response = json.loads(text)
        except ValueError as error:
            raise Unreachable(f"the API server's response to {path} is not JSON") from error
        if not isinstance(response, dict) or not isinstance(response.get("metadata", {}), dict):
            raise Unreachable(f"the API server's response to {path} is not an object")
        return response

    def _exchange(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        connection: http.client.HTTPConnection
        if self._context is None:
            connection = http.client.HTTPConnection(self._host, self._port, REQUEST_SECONDS)
        else:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=REQUEST_SECONDS, context=self._context
            )
        try:
            # Projected tokens are replaced in the same file.
            token = self._token_file.read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            data = None
            if body is not None:
                headers["Content-Type"] = "application/json"
                data = json.dumps(body).encode()
            connection.request(method, path, data, headers)
            http_response = connection.getresponse()
            content = http_response.read(RESPONSE_BYTES_MAX + 1)
            if len(content) > RESPONSE_BYTES_MAX:
                raise OSError(f"a response above {RESPONSE_BYTES_MAX} bytes")
            return http_response.status, content
        finally:
            connection.close()


def _part(name: str) -> str:
    """Quote a name as one part of a path."""
    return quote(name, safe="")


def _first(values: object) -> str:
    return str(values[0]) if isinstance(values, list) and values else ""


def _uid(response: dict[str, Any]) -> str:
    return str((response.get("metadata") or {}).get("uid", ""))
