"""Probes and metrics over HTTP.

/healthz: the event loop turns and the API server was heard lately on every watch.
/readyz:  the cluster is known; whoever leads serves, the others could.
/leaderz: this process leads and serves.
/metrics: Prometheus.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

if TYPE_CHECKING:
    from flyer.kube.metrics import Metrics
    from flyer.kube.services import Leader, World

__all__ = ["Health"]

# A healthy watch says something at least once a minute.
WATCH_AGE_SECONDS_MAX: Final = 90.0
# A step may wait for a slow API server, but not for ever: its calls have deadlines.
TERM_AGE_SECONDS_MAX: Final = 120.0
TICK_SECONDS: Final = 1.0
TICK_AGE_SECONDS_MAX: Final = 30.0


class Health:
    """Judges one process."""

    def __init__(self, world: World, leader: Leader, metrics: Metrics) -> None:
        self._world = world
        self._leader = leader
        self._metrics = metrics
        self._ticked_at = time.monotonic()

    def sick(self) -> str:
        """Why the process should be started again; empty: it is well."""
        age = self._world.age_seconds
        if age > WATCH_AGE_SECONDS_MAX:
            return f"a watch has been silent for {age:.0f} s"
        tick = time.monotonic() - self._ticked_at
        if tick > TICK_AGE_SECONDS_MAX:
            return f"the event loop was stuck for {tick:.0f} s"
        term = self._leader.term
        if term is not None and term.serving:
            stuck = time.monotonic() - term.ticked_at
            if stuck > TERM_AGE_SECONDS_MAX:
                return f"the scheduler has not moved for {stuck:.0f} s"
        return ""

    async def run(self, host: str, port: int) -> None:
        """Serve until cancelled."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/leaderz", self._leaderz)
        app.router.add_get("/metrics", self._metricsz)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            while True:
                self._ticked_at = time.monotonic()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            await runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _answer(self.sick())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _answer("" if self._world.synced else "the cluster is not listed yet")

    async def _leaderz(self, _request: web.Request) -> web.Response:
        term = self._leader.term
        return _answer("" if term is not None and term.serving else "another one leads, or nobody")

    async def _metricsz(self, _request: web.Request) -> web.Response:
        ages = ((cache.resource.plural, cache.age_seconds) for cache in self._world.caches)
        self._metrics.heard(ages)
        self._metrics.count()
        body = generate_latest(self._metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _answer(why: str) -> web.Response:
    return web.Response(text=f"{why or 'ok'}\n", status=503 if why else 200)
