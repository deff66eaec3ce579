"""Who a sidecar is: the API server's word on its token, never its own.

The client layer implements `Identities` with TokenReview; tests have a fake.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Identities", "IdentityUnknownError", "PodIdentity", "TokenRefusedError"]


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
