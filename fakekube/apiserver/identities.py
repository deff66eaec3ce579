"""Service-account tokens of the in-memory API server: issue them, review them."""

from __future__ import annotations

import base64
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fakekube.apiserver.store import Store


@dataclass(frozen=True, slots=True)
class Token:
    """The account and pod of a token."""

    namespace: str
    service_account: str
    audiences: tuple[str, ...]
    pod: str = ""
    pod_uid: str = ""


class Tokens:
    """Issued tokens, each valid as long as its pod exists."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tokens: dict[str, Token] = {}

    def issue(
        self,
        namespace: str,
        *,
        pod: str = "",
        service_account: str = "default",
        audiences: tuple[str, ...] = ("fireflyer-gateway",),
    ) -> str:
        """Issue a projected token for an existing pod."""
        uid = self._store.get("pods", pod, namespace)["metadata"]["uid"] if pod else ""
        text = _token(namespace, pod, uid)
        self._tokens[text] = Token(namespace, service_account, audiences, pod, uid)
        return text

    def review(self, body: dict[str, Any]) -> dict[str, Any]:
        """The TokenReview with its status."""
        spec = body.get("spec", {})
        token = self._tokens.get(spec.get("token", ""))
        requested = spec.get("audiences") or []
        audiences = [
            audience for audience in (token.audiences if token else ()) if audience in requested
        ]
        if token is None or (requested and not audiences) or not self._is_bound(token):
            status: dict[str, Any] = {"authenticated": False, "error": "invalid bearer token"}
            return {**body, "status": status}
        extra = {}
        if token.pod:
            extra = {
                "authentication.kubernetes.io/pod-name": [token.pod],
                "authentication.kubernetes.io/pod-uid": [token.pod_uid],
            }
        user = {
            "username": f"system:serviceaccount:{token.namespace}:{token.service_account}",
            "groups": ["system:serviceaccounts", f"system:serviceaccounts:{token.namespace}"],
            "extra": extra,
        }
        return {**body, "status": {"authenticated": True, "user": user, "audiences": audiences}}

    def _is_bound(self, token: Token) -> bool:
        if not token.pod:
            return True
        pod = self._store.find("pods", token.pod, token.namespace)
        return pod is not None and pod["metadata"]["uid"] == token.pod_uid


def _token(namespace: str, pod: str, uid: str) -> str:
    """A token in the form of a projected one, with a random signature."""
    binding = {"pod": {"name": pod, "uid": uid}} if pod else {}
    claims = {"kubernetes.io": {"namespace": namespace, **binding}}
    parts = [json.dumps(claim).encode() for claim in ({"alg": "RS256"}, claims)]
    parts.append(secrets.token_bytes(24))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


__all__ = ["Token", "Tokens"]
