"""Identities of sidecars, from the API server's review of their tokens.

The API client implements `Identities` with TokenReview; tests use a fake.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = [
    "Identities",
    "IdentityUnknownError",
    "PodIdentity",
    "TokenRefusedError",
    "claimed_pod",
]

_CLAIMS: Final = "kubernetes.io"


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """Identity of a pod according to the API server."""

    namespace: str
    name: str
    uid: str
    ip: str = ""
    """Its address for its peers; empty while unknown (a token review does not contain it)."""


class TokenRefusedError(Exception):
    """The API server rejects the token, or it is not bound to a pod. Never contains the token."""


class IdentityUnknownError(Exception):
    """The API server cannot be reached; the same token may be accepted later."""


class Identities(Protocol):
    """Token reviews by the API server."""

    async def review(self, token: str) -> PodIdentity:
        """The pod of this token, which must have the audience `fireflyer-gateway`.

        Raises `TokenRefusedError` or `IdentityUnknownError`. Must return within seconds.
        """
        ...


def claimed_pod(token: str) -> str:
    """Uid of the pod that a projected token claims to be bound to; empty: none.

    The claim is not verified. It may be used to refuse a token without a review, never to accept.
    """
    parts = token.split(".")
    if len(parts) != 3:
        return ""
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        uid = claims[_CLAIMS]["pod"]["uid"]
    except (binascii.Error, ValueError, RecursionError, KeyError, TypeError, IndexError):
        return ""
    return uid if isinstance(uid, str) else ""
