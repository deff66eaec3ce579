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
    """One pod, as the API server knows it."""

    namespace: str
    name: str
    uid: str
    ip: str = ""
    """Where its peers reach it; empty while nobody knows (a token's review does not tell)."""


class TokenRefusedError(Exception):
    """The API server does not accept the token, or it is bound to no pod. Never hold the token."""


class IdentityUnknownError(Exception):
    """The API server could not be asked; the same token may be good later."""


class Identities(Protocol):
    """Asks the API server."""

    async def review(self, token: str) -> PodIdentity:
        """Whose token this is, for the audience `fireflyer-gateway` alone.

        Raises `TokenRefusedError` or `IdentityUnknownError`. Must itself end within seconds.
        """
        ...


def claimed_pod(token: str) -> str:
    """Uid of the pod that a projected token claims to be bound to; empty: it claims none.

    Unverified: anybody can write it. It may refuse a token without a review, never accept one.
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
