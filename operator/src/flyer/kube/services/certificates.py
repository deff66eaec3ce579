"""Certificate manager: creates and renews the operator's certificates in their Secrets.

Every replica runs it, because each may lead; a compare-and-swap on the Secret decides between
concurrent renewals.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.apiserver.errors import ApiError, ConflictError, NotFoundError
from flyer.kube.apiserver.resources import SECRETS, WEBHOOKS
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

    from flyer.kube.apiserver import Api

__all__ = ["WEBHOOK_NAME", "CertificateManager"]

WEBHOOK_NAME: Final = "flyer-injection"
LOOK_SECONDS: Final = 30.0
"""Time until a changed webhook configuration or Secret is corrected, such as by an installer."""
RETRY_SECONDS: Final = 5.0
"""Also used until the webhook configuration exists, which is installed after the operator."""
_TRIES_MAX: Final = 10

log = logging.getLogger(__name__)


class CertificateManager:
    """Manages the certificates. Each `use` callback gets every new version.

    `names`: DNS names of the operator; `webhook`: those of the webhook, empty if it is disabled.
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
        self._webhook_updated = False
        self._held: dict[str, bytes] | None = None  # last read or stored
        self._users: list[Callable[[Certificates], None]] = []

    def serve_with(self, use: Callable[[Certificates], None]) -> None:
        """Call `use` now and after each renewal."""
        self._users.append(use)
        if self.current is not None:
            use(self.current)

    def forget(self, use: Callable[[Certificates], None]) -> None:
        """Remove a callback."""
        self._users.remove(use)

    async def run(self) -> None:
        """Renew the certificates until cancelled."""
        while True:
            try:
                await self.refresh()
            except ApiError as error:
                log.warning("cannot renew certificates, retrying: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                reported = self._webhook_updated or not self._webhook
                await asyncio.sleep(LOOK_SECONDS if reported else RETRY_SECONDS)

    async def refresh(self) -> Certificates:
        """Read the Secrets, renew and store what is due, and call the callbacks."""
        # A Secret emptied by an installer is restored with the authorities that sidecars trust.
        data = await self._stored(
            SECRET_NAME, lambda stored, now: renewed(stored or self._held, self._names, now)
        )
        self._held = data
        refreshed = certificates_of(data)
        if refreshed != self.current:
            self.current = refreshed
            self.ready.set()
            for use in self._users:
                use(refreshed)
        if self._webhook:
            await self._stored(
                WEBHOOK_SECRET_NAME,
                lambda stored, now: renewed_webhook(data, stored, self._webhook, now),
            )
            self._webhook_updated = await self._update_webhook(refreshed.bundle)
        return refreshed

    async def _stored(
        self, name: str, renew: Callable[[dict[str, bytes], datetime], dict[str, bytes]]
    ) -> dict[str, bytes]:
        for _ in range(_TRIES_MAX):
            try:
                secret: dict[str, Any] = await self._api.get(SECRETS, name, self._namespace)
            except NotFoundError:
                secret = {}
            secret_data = {
                key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()
            }
            data = renew(secret_data, datetime.now(UTC))
            if data == secret_data:
                return data
            try:
                await self._store(name, secret, data)
            except ConflictError:
                continue  # another replica renewed it: use its version
            return data
        raise ConflictError(f"update secrets {name}", "it changes too often")

    async def _store(self, name: str, secret: dict[str, Any], data: dict[str, bytes]) -> None:
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        if secret:
            await self._api.replace(SECRETS, {**secret, "data": encoded})
            return
        metadata = {"name": name, "namespace": self._namespace}
        fresh = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata}
        await self._api.create(SECRETS, {**fresh, "data": encoded}, self._namespace)

    async def _update_webhook(self, bundle: str) -> bool:
        """Write the authorities into the webhook configuration, so that the API server trusts it.

        Returns whether they are in place.
        """
        encoded = base64.b64encode(bundle.encode()).decode()
        try:
            configuration = await self._api.get(WEBHOOKS, WEBHOOK_NAME)
        except NotFoundError:
            return False
        hooks = configuration.get("webhooks") or []
        if all(hook.get("clientConfig", {}).get("caBundle") == encoded for hook in hooks):
            return bool(hooks)
        changed = [
            {**hook, "clientConfig": {**hook["clientConfig"], "caBundle": encoded}}
            for hook in hooks
        ]
        version = configuration["metadata"]["resourceVersion"]
        patch = {"metadata": {"resourceVersion": version}, "webhooks": changed}
        try:
            await self._api.merge(WEBHOOKS, WEBHOOK_NAME, patch)
        except ConflictError:
            return False  # it changed concurrently
        log.info("webhook caBundle updated")
        return True
