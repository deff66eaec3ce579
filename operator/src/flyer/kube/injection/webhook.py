"""The webhook's server: HTTPS, one path. It never refuses a pod, and answers within its time.

An answer other than 200 makes the API server continue without it (`failurePolicy: Ignore`), which
is what anything unexpected comes to. Connections, bodies and processor time are bounded, and
sources are served fairly by the sizes of their reviews: a client that floods it delays itself
before it delays the API server.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter

from flyer.kube.gateway.tls import load_certificates, server_context, trust_clients
from flyer.kube.injection.review import INJECTED, UNCHANGED, NoReviewError, respond
from flyer.kube.servers.connection_limits import ConnectionLimitSettings
from flyer.kube.servers.fair_semaphore import FairSemaphore
from flyer.kube.servers.web import (
    BodyTooLargeError,
    WebServer,
    WebSettings,
    read_body,
    slot_of,
)

if TYPE_CHECKING:
    from flyer.kube.gateway.certificates import Certificates
    from flyer.kube.pods.settings import PodSettings

__all__ = ["INJECTION_PATH", "INJECTION_PORT", "InjectionMetrics", "Webhook"]

INJECTION_PATH: Final = "/inject"
INJECTION_PORT: Final = 9443
REVIEW_BYTES_MAX: Final = 3 * 1024 * 1024
"""The API server takes no larger request; the review of a creation has the object once."""
COST_BYTES: Final = 64 * 1024
"""A review of a pod is seldom larger, and takes milliseconds; one of 3 MiB of brackets a second."""
ANSWER_SECONDS: Final = 4.0  # below the configuration's five
FAILED, REFUSED = "failed", "refused"
LIMITS: Final = WebSettings(
    # With every body at its limit 384 MiB. The API server may be one source: it has most places.
    limits=ConnectionLimitSettings(total_max=128, source_max=96, rate_per_second=200.0, burst=400),
    head_seconds=10.0,
    answer_seconds=ANSWER_SECONDS,
)

log = logging.getLogger(__name__)


class InjectionMetrics:
    """Made once a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.injections = Counter(
            "flyer_injections", "Admission reviews of pods, by result", ["result"],
            registry=registry,
        )  # fmt: skip
        for result in (INJECTED, UNCHANGED, FAILED, REFUSED):
            self.injections.labels(result)


class Webhook:
    """Serves until cancelled; every replica does."""

    def __init__(
        self,
        *,
        settings: PodSettings,
        own_namespaces: frozenset[str],
        metrics: InjectionMetrics | None = None,
        host: str = "0.0.0.0",  # noqa: S104  the API server connects
        port: int = INJECTION_PORT,
        client_authority: str = "",
        limits: WebSettings = LIMITS,
    ) -> None:
        """`client_authority`: PEM of the authority of the API server's client certificate.

        With it, a client without such a certificate gets no further than the TLS handshake.
        """
        self._settings = settings
        self._own_namespaces = own_namespaces
        self._metrics = metrics or InjectionMetrics(CollectorRegistry())
        self._host, self._port = host, port
        self._context = server_context()
        if client_authority:
            trust_clients(self._context, client_authority)
        self._semaphore = FairSemaphore()
        self._server_ = WebServer(
            self._handle,
            limits,
            context=self._context,
            refused=self._metrics.injections.labels(REFUSED).inc,
        )
        self.listening = asyncio.Event()

    @property
    def port(self) -> int:
        """The bound port, once it listens."""
        return self._server_.port

    def use(self, certificates: Certificates) -> None:
        """Serve with these from the next connection on; before `serve` at the latest."""
        load_certificates(self._context, certificates)

    async def serve(self) -> None:
        """Serve; returns only by being cancelled."""
        self._server_.open(self._host, self._port)
        self.listening.set()
        await self._server_.run()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != INJECTION_PATH or request.method != "POST":
            return web.Response(status=404, text=f"POST {INJECTION_PATH} is all there is\n")
        try:
            body = await read_body(request, REVIEW_BYTES_MAX)
            slot = slot_of(request)
            cost = 1 << (len(body) // COST_BYTES).bit_length()
            async with self._semaphore.acquire(slot.source, cost):
                answer, result = respond(json.loads(body), self._settings, self._own_namespaces)
        except (NoReviewError, ValueError, RecursionError) as error:
            self._metrics.injections.labels(FAILED).inc()
            return web.Response(status=400, text=f"{error!s:.200}\n")
        except (TimeoutError, asyncio.CancelledError, BodyTooLargeError):
            self._metrics.injections.labels(FAILED).inc()
            raise
        except Exception:
            self._metrics.injections.labels(FAILED).inc()
            log.exception("injection: a review was not understood")
            return web.Response(status=500, text="not understood\n")
        self._metrics.injections.labels(result).inc()
        return web.json_response(answer)
