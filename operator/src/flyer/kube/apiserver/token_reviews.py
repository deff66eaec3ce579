"""Token reviews: authenticates the bearer tokens of sidecars through the API server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from flyer.kube.apiserver.errors import ApiError
from flyer.kube.apiserver.resources import TOKENREVIEWS
from flyer.kube.gateway.identities import IdentityUnknownError, PodIdentity, TokenRefusedError
from flyer.kube.pods import TOKEN_AUDIENCE

if TYPE_CHECKING:
    from flyer.kube.apiserver.api import Api

__all__ = ["TokenReviews"]

REVIEW_SECONDS: Final = 8.0
_POD_NAME: Final = "authentication.kubernetes.io/pod-name"
_POD_UID: Final = "authentication.kubernetes.io/pod-uid"
_ACCOUNT: Final = "system:serviceaccount:"


class TokenReviews:
    """Implements `flyer.kube.gateway.Identities`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def review(self, token: str) -> PodIdentity:
        """The pod of this token, which must be valid for the gateway's audience."""
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
        }
        try:
            async with asyncio.timeout(REVIEW_SECONDS):
                answer = await self._api.create(TOKENREVIEWS, review)
        except (ApiError, TimeoutError) as error:
            raise IdentityUnknownError(f"cannot review the token: {error}") from None
        status = answer.get("status") or {}
        if not status.get("authenticated") or TOKEN_AUDIENCE not in (status.get("audiences") or ()):
            raise TokenRefusedError("the API server rejects the token for this audience")
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        name, uid = extra.get(_POD_NAME) or [""], extra.get(_POD_UID) or [""]
        account = str(user.get("username", ""))
        if not name[0] or not uid[0] or not account.startswith(_ACCOUNT):
            raise TokenRefusedError("the token is not bound to a pod")
        namespace = account.removeprefix(_ACCOUNT).partition(":")[0]
        return PodIdentity(namespace, name[0], uid[0])
