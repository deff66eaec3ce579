"""A Kubernetes API server with the calls of the issuer: objects, and tokens bound to pods."""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

DRIVER_NAMESPACE = "fireflyer-system"
DRIVER_NAME = "3fs.csi.fireflyer.dev"


@dataclass(frozen=True)
class Token:
    """The identity of a token."""

    namespace: str
    account: str
    pod: str
    pod_uid: str
    audiences: tuple[str, ...]


class FakeApiServer:
    """Reviews tokens like the API server: signature, audience, and existence of the pod."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, Token] = {}
        self.fail = 0
        self.knows_audiences = True
        self.own_token = secrets.token_urlsafe(16)
        self.asked: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(fake.get(self.path))

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self._answer(fake.review(json.loads(self.rfile.read(length))))

            def _answer(self, document: dict[str, Any] | None) -> None:
                fake.asked.append(self.path)
                status = 200 if document is not None else 404
                if self.headers["Authorization"] != f"Bearer {fake.own_token}":
                    status, document = 401, {}
                if fake.fail:
                    status, document = fake.fail, {}
                body = json.dumps(document or {"kind": "Status"}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def token_file(self, folder: Path) -> Path:
        """The token of the issuer's own service account."""
        path = folder / "own-token"
        path.write_text(self.own_token + "\n")
        return path

    # Calls of the issuer

    def get(self, path: str) -> dict[str, Any] | None:
        return self.objects.get(path)

    def review(self, body: dict[str, Any]) -> dict[str, Any]:
        spec = body["spec"]
        token = self.tokens.get(spec["token"])
        requested = spec.get("audiences") or ["https://kubernetes.default.svc"]
        audiences = [name for name in (token.audiences if token else ()) if name in requested]
        status: dict[str, Any] = {"authenticated": False, "error": "invalid bearer token"}
        if token is not None and audiences and self._is_bound(token):
            extra = {}
            if token.pod:
                extra = {
                    "authentication.kubernetes.io/pod-name": [token.pod],
                    "authentication.kubernetes.io/pod-uid": [token.pod_uid],
                }
            username = f"system:serviceaccount:{token.namespace}:{token.account}"
            status = {
                "authenticated": True,
                "user": {"username": username, "extra": extra},
                "audiences": audiences if self.knows_audiences else [],
            }
        return {**body, "status": status}

    def _is_bound(self, token: Token) -> bool:
        if not token.pod:
            return True
        pod = self.objects.get(pod_path(token.namespace, token.pod))
        return pod is not None and pod["metadata"]["uid"] == token.pod_uid

    # Calls of tests

    def issue(
        self,
        namespace: str,
        pod: str,
        account: str = "default",
        audiences: tuple[str, ...] = ("3fs",),
    ) -> str:
        """Create a token, bound to a pod if one is named."""
        text = secrets.token_urlsafe(24)
        uid = self.objects[pod_path(namespace, pod)]["metadata"]["uid"] if pod else ""
        self.tokens[text] = Token(namespace, account, pod, uid, audiences)
        return text

    def add_node_plugin(self, node: str, namespace: str = DRIVER_NAMESPACE) -> str:
        """Create the node plugin of a node; returns its token."""
        self.add_pod(namespace, f"threefs-csi-node-{node}", node)
        return self.issue(namespace, f"threefs-csi-node-{node}", "threefs-csi-node")

    def add_pod(
        self, namespace: str, name: str, node: str, claims: tuple[str, ...] = (), **more: Any
    ) -> dict[str, Any]:
        volumes = [
            {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim}}
            for number, claim in enumerate(claims)
        ]
        pod = {
            "metadata": {"name": name, "namespace": namespace, "uid": secrets.token_hex(8)},
            "spec": {"nodeName": node, "volumes": volumes, **more},
            "status": {"phase": "Pending"},
        }
        self.objects[pod_path(namespace, name)] = pod
        return pod

    def add_claim(
        self,
        namespace: str,
        name: str,
        handle: str,
        *,
        driver: str = DRIVER_NAME,
        modes: tuple[str, ...] = ("ReadWriteMany",),
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Create a claim and the PersistentVolume to which it is bound."""
        uid = secrets.token_hex(8)
        claim = {
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "spec": {"volumeName": f"pv-{uid}"},
        }
        volume = {
            "metadata": {"name": f"pv-{uid}", "uid": secrets.token_hex(8)},
            "spec": {
                "csi": {"driver": driver, "volumeHandle": handle},
                "claimRef": {"namespace": namespace, "name": name, "uid": uid},
                "accessModes": list(modes),
            },
        }
        self.objects[f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}"] = claim
        self.objects[f"/api/v1/persistentvolumes/pv-{uid}"] = volume
        return claim, volume


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"
