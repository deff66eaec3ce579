"""`flyer-webhook`: the injection webhook, a process without rights.

It has no access to the API server and shares nothing with the scheduler: certificates come from
files (a mounted Secret that the operator writes), settings from the environment. A hostile client
can at most prevent injection, which fails open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from flyer.kube.gateway.certificates import BUNDLE, LEAF, LEAF_KEY, Certificates
from flyer.kube.injection.settings import WebhookSettings, parse_webhook_settings
from flyer.kube.injection.webhook import InjectionMetrics, Webhook
from flyer.kube.logs import write_json_logs
from flyer.kube.pods import PodSettings
from flyer.kube.servers.web import WebServer, WebSettings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "serve"]

LOOK_SECONDS: Final = 5.0
"""Certificates are renewed a month before they expire; the kubelet updates files in a minute."""

log = logging.getLogger("flyer.webhook")


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT."""
    settings = parse_webhook_settings(arguments)
    write_json_logs(settings.log_level)
    asyncio.run(serve(settings))
    return 0


async def serve(settings: WebhookSettings) -> None:
    """Serve probes and metrics immediately, and the webhook once there are certificates."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    work = asyncio.create_task(_Process(settings).run())
    ending = asyncio.create_task(stop.wait())
    await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
    work.cancel()
    ending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


class _Process:
    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._registry = CollectorRegistry()
        self._held: Certificates | None = None
        authority = ""
        if settings.client_ca_file:
            authority = Path(settings.client_ca_file).read_text(encoding="ascii")
        self._webhook = Webhook(
            settings=PodSettings(
                controller_image=settings.sidecar_image,
                collectives_image=settings.collectives_image,
                gateway_ca="",
                image_pull_policy=settings.image_pull_policy,
                image_pull_secrets=tuple(
                    name for name in settings.image_pull_secrets.split(",") if name
                ),
            ),
            own_namespaces=frozenset({settings.namespace, "kube-system"}),
            metrics=InjectionMetrics(self._registry),
            host=settings.host,
            port=settings.port,
            client_authority=authority,
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._serve_status())
            serving: asyncio.Task[None] | None = None
            while True:
                has_certificates = self._renew(self._webhook.use)
                if has_certificates and serving is None:
                    serving = group.create_task(self._webhook.serve())
                await asyncio.sleep(LOOK_SECONDS if has_certificates else LOOK_SECONDS / 10)

    def _renew(self, use: Callable[[Certificates], None]) -> bool:
        """Read the files. Returns whether there are certificates."""
        folder = Path(self._settings.certificates_folder)
        try:
            certificates = Certificates(
                *((folder / name).read_text(encoding="ascii") for name in (BUNDLE, LEAF, LEAF_KEY))
            )
            if certificates != self._held:
                use(certificates)
                self._held = certificates
        except (OSError, ValueError) as error:  # missing, or being replaced
            if self._held is None:
                log.info("no certificates yet: %s", error)
        return self._held is not None

    async def _serve_status(self) -> None:
        server = WebServer(self._status, WebSettings())
        server.open(self._settings.host, self._settings.metrics_port)
        await server.run()

    async def _status(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/healthz":
                return web.Response(text="ok\n")
            case "/readyz" if self._webhook.listening.is_set():
                return web.Response(text="ok\n")
            case "/readyz":
                return web.Response(status=503, text="no certificates yet\n")
            case "/metrics":
                body = generate_latest(self._registry)
                return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
        return web.Response(status=404)


if __name__ == "__main__":
    sys.exit(main())
