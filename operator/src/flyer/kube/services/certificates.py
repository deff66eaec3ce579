"""The operator's certificates in their Secrets: made, renewed, handed to what serves with them.

Every replica does this, because each may lead; a Secret's compare-and-swap decides whose version
counts.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.client.errors import ApiError, ConflictError, NotFoundError
from flyer.kube.client.resources import SECRETS, WEBHOOKS
from flyer.kube.gateway.certificates import (
    SECRET_NAME,
    WEBHOOK_SECRET_NAME,
    Certificates,
    certificates_of,
    renewed,
    renewed_webhook,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer.kube.client import Api

__all__ = ["WEBHOOK_NAME", "CertificateKeeper"]

WEBHOOK_NAME: Final = "flyer-injection"
LOOK_SECONDS: Final = 30.0
"""Whoever replaced the registration or the Secret, an installer for one, is corrected so soon."""
RETRY_SECONDS: Final = 5.0
"""Also until the registration is there: it is installed after the operator."""
_TRIES_MAX: Final = 10

log = logging.getLogger(__name__)


class CertificateKeeper:
    """`use` is called with every new version.

    `names`: under which the operator is reached; `webhook`: the webhook, none where it is off.
    """

    def __init__(
        self, api: Api, namespace: str, names: Sequence[str], *, webhook: Sequence[str] = ()
    ) -> None:
        self.current: Certificates | None = None
        self.ready = asyncio.Event()
        self._api = api
        self._namespace = namespace
        self._names = tuple(names)
        self._webhook = tuple(webhook)
        self._told = False
        self._held: dict[str, bytes] | None = None  # as last read or stored
        self._users: list[Callable[[Certificates], None]] = []

    def serve_with(self, use: Callable[[Certificates], None]) -> None:
        """Hand them over now, and again when they are renewed."""
        self._users.append(use)
        if self.current is not None:
            use(self.current)

    def forget(self, use: Callable[[Certificates], None]) -> None:
        """Whoever served serves no more."""
        self._users.remove(use)

    async def run(self) -> None:
        """Keep them fresh until cancelled."""
        while True:
            try:
                await self.refresh()
            except ApiError as error:
                log.warning("certificates cannot be renewed now: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                told = self._told or not self._webhook
                await asyncio.sleep(LOOK_SECONDS if told else RETRY_SECONDS)

    async def refresh(self) -> Certificates:
        """Read, renew what is due, store, hand over."""
        # Emptied by an installer, it gets back what running sidecars trust.
        data = await self._stored(
            SECRET_NAME, lambda held, now: renewed(held or self._held, self._names, now)
        )
        self._held = data
        found = certificates_of(data)
        if found != self.current:
            self.current = found
            self.ready.set()
            for use in self._users:
                use(found)
        if self._webhook:
            await self._stored(
                WEBHOOK_SECRET_NAME,
                lambda held, now: renewed_webhook(data, held, self._webhook, now),
            )
            self._told = await self._tell_webhook(found.bundle)
        return found

    async def _stored(
        self, name: str, renew: Callable[[dict[str, bytes], datetime], dict[str, bytes]]
    ) -> dict[str, bytes]:
        for _ in range(_TRIES_MAX):
            try:
                secret: dict[str, Any] = await self._api.get(SECRETS, name, self._namespace)
            except NotFoundError:
                secret = {}
            held = {key: base64.b64decode(one) for key, one in (secret.get("data") or {}).items()}
            data = renew(held, datetime.now(UTC))
            if data == held:
                return data
            try:
                await self._store(name, secret, data)
            except ConflictError:
                continue  # another replica was faster: use what it stored
            return data
        raise ConflictError(f"update secrets {name}", "it changes all the time")

    async def _store(self, name: str, secret: dict[str, Any], data: dict[str, bytes]) -> None:
        encoded = {key: base64.b64encode(one).decode() for key, one in data.items()}
        if secret:
            await self._api.replace(SECRETS, {**secret, "data": encoded})
            return
        metadata = {"name": name, "namespace": self._namespace}
        fresh = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata}
        await self._api.create(SECRETS, {**fresh, "data": encoded}, self._namespace)

    async def _tell_webhook(self, bundle: str) -> bool:
        """The API server has to trust the webhook: write the authorities into its configuration.

        Whether they stand there.
        """
        encoded = base64.b64encode(bundle.encode()).decode()
        try:
            found = await self._api.get(WEBHOOKS, WEBHOOK_NAME)
        except NotFoundError:
            return False
        hooks = found.get("webhooks") or []
        if all(one.get("clientConfig", {}).get("caBundle") == encoded for one in hooks):
            return bool(hooks)
        changed = [
            {**one, "clientConfig": {**one["clientConfig"], "caBundle": encoded}} for one in hooks
        ]
        version = found["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version}, "webhooks": changed}
        try:
            await self._api.merge(WEBHOOKS, WEBHOOK_NAME, patch)
        except ConflictError:
            return False  # it changed meanwhile
        log.info("the registration of the webhook has our authorities")
        return True
