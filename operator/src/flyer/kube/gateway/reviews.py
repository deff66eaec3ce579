"""Token reviews for the gateway: admission, concurrency limits, and a cache of refused tokens.

A token that does not claim to belong to an expected pod is refused without a review. Connections
from the addresses of expected pods have a separate limit, so that a flood of claims from other
addresses delays no member.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from flyer.kube.gateway.identities import IdentityUnknownError, TokenRefusedError, claimed_pod
from flyer.kube.gateway.stream import RefusedError
from flyer.kube.servers.fair_semaphore import FairSemaphore

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.kube.gateway.identities import Identities, PodIdentity
    from flyer.kube.gateway.listener import Connection
    from flyer.kube.gateway.settings import GatewaySettings

__all__ = ["TokenReviewer"]


class TokenReviewer:
    """Reviews by `identities`; `expects(uid)` returns whether a pod is expected."""

    def __init__(
        self,
        identities: Identities,
        expects: Callable[[str], bool],
        settings: GatewaySettings,
    ) -> None:
        self._identities = identities
        self._expects = expects
        self._settings = settings
        self._members = asyncio.Semaphore(settings.reviews_max)
        self._unexpected = FairSemaphore(settings.unexpected_reviews_max)
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()  # by digest

    async def review(self, token: str, connection: Connection) -> PodIdentity:
        """The pod of this token. Raises `RefusedError`."""
        if not self._expects(claimed_pod(token)):
            raise RefusedError("unknown_pod", "the token belongs to no pod of a running gang")
        loop = asyncio.get_running_loop()
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        until, why = self._refused.get(digest, (0.0, ""))
        if loop.time() < until and not connection.expected:
            raise RefusedError("bad_token", why)
        connection.busy()
        try:
            async with asyncio.timeout(self._settings.review_seconds):
                return await self._review_in_turn(token, connection)
        except TokenRefusedError as error:
            why = f"token rejected: {error}"
            self._remember(digest, loop.time() + self._settings.refusal_seconds, why)
            raise RefusedError("bad_token", why) from error
        except (IdentityUnknownError, TimeoutError) as error:
            message = "the API server cannot review the token now; retry later"
            raise RefusedError("review_unavailable", message) from error

    async def _review_in_turn(self, token: str, connection: Connection) -> PodIdentity:
        if connection.expected:
            async with self._members:
                return await self._identities.review(token)
        async with self._unexpected.acquire(connection.source):
            return await self._identities.review(token)

    def _remember(self, digest: bytes, until: float, why: str) -> None:
        self._refused[digest] = (until, why)
        self._refused.move_to_end(digest)
        if len(self._refused) > self._settings.refusals_max:
            self._refused.popitem(last=False)
