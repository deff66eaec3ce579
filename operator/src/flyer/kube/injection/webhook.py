"""The webhook's server: HTTPS, one path. It never refuses a pod, and answers within its time.

An answer other than 200 makes the API server go on without us (`failurePolicy: Ignore`), which is
what anything unexpected comes to.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter

from flyer.kube.gateway.tls import load_certificates, server_context
from flyer.kube.injection.review import INJECTED, UNCHANGED, NoReviewError, respond

if TYPE_CHECKING:
    from flyer.kube.gateway.certificates import Certificates
    from flyer.kube.pods.settings import PodSettings

__all__ = ["INJECTION_PATH", "INJECTION_PORT", "InjectionMetrics", "Webhook"]

INJECTION_PATH: Final = "/inject"
INJECTION_PORT: Final = 9443
REVIEW_BYTES_MAX: Final = 8 * 1024 * 1024  # two objects of the API server's limit, and then some
ANSWER_SECONDS: Final = 4.0  # below the configuration's five
FAILED: Final = "failed"

log = logging.getLogger(__name__)


class InjectionMetrics:
    """Made once a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.injections = Counter(
            "flyer_injections", "Pods that the webhook saw", ["result"], registry=registry
        )
        for result in (INJECTED, UNCHANGED, FAILED):
            self.injections.labels(result)


class Webhook:
    """Serves until cancelled; leaders and others alike."""

    def __init__(
        self,
        *,
        settings: PodSettings,
        own_namespaces: frozenset[str],
        metrics: InjectionMetrics | None = None,
        host: str = "0.0.0.0",  # noqa: S104  the API server connects
        port: int = INJECTION_PORT,
    ) -> None:
        self._settings = settings
        self._own_namespaces = own_namespaces
        self._metrics = metrics or InjectionMetrics(CollectorRegistry())
        self._host, self._port = host, port
        self._context = server_context()
        self.port = 0
        """Where it listens, once it does."""
        self.listening = asyncio.Event()

    def use(self, certificates: Certificates) -> None:
        """Serve with these from the next connection on; before `serve` at the latest."""
        load_certificates(self._context, certificates)

    async def serve(self) -> None:
        """Serve; returns only by being cancelled."""
        application = web.Application(client_max_size=REVIEW_BYTES_MAX)
        application.router.add_post(INJECTION_PATH, self._review)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=ANSWER_SECONDS)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port, ssl_context=self._context)
            await site.start()
            self.port = runner.addresses[0][1]
            self.listening.set()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _review(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                review = json.loads(await request.read())
            answer, result = respond(review, self._settings, self._own_namespaces)
        except (NoReviewError, ValueError, RecursionError) as error:
            self._metrics.injections.labels(FAILED).inc()
            return web.Response(status=400, text=f"{error!s:.200}\n")
        except web.HTTPException:
            self._metrics.injections.labels(FAILED).inc()
            raise
        except Exception:
            self._metrics.injections.labels(FAILED).inc()
            log.exception("injection: a review was not understood")
            return web.Response(status=500, text="not understood\n")
        self._metrics.injections.labels(result).inc()
        return web.json_response(answer)
