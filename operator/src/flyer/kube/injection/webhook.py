"""HTTPS server of the injection webhook. It allows every pod and responds within a deadline.

After an error the API server continues without it (`failurePolicy: Ignore`). Connections, bodies
and processor time are bounded, and sources are served fairly by the sizes of their reviews: a
client that floods the webhook delays itself before it delays the API server.
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
"""Limit of the API server's requests; the review of a creation contains the object once."""
COST_BYTES: Final = 64 * 1024
"""Most reviews are smaller and take milliseconds; 3 MiB of brackets take a second."""
ANSWER_SECONDS: Final = 4.0  # less than the five of the webhook configuration
FAILED, REFUSED = "failed", "refused"
LIMITS: Final = WebSettings(
    # 384 MiB with every body at its limit. The API server may be one source: it has most slots.
    limits=ConnectionLimitSettings(total_max=128, source_max=96, rate_per_second=200.0, burst=400),
    head_seconds=10.0,
    answer_seconds=ANSWER_SECONDS,
)

log = logging.getLogger(__name__)


class InjectionMetrics:
    """The webhook's series, created once per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.injections = Counter(
            "flyer_injections", "Admission reviews of pods, by result", ["result"],
            registry=registry,
        )  # fmt: skip
        for result in (INJECTED, UNCHANGED, FAILED, REFUSED):
            self.injections.labels(result)


class Webhook:
    """Serves until cancelled, on every replica."""

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

        If it is set, the TLS handshake fails for a client without such a certificate.
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
        """The bound port, while it listens."""
        return self._server_.port

    def use(self, certificates: Certificates) -> None:
        """Use these certificates from the next connection on. Required before `serve`."""
        load_certificates(self._context, certificates)

    async def serve(self) -> None:
        """Serve until cancelled."""
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
