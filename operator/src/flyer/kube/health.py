"""Health of the operator's process, and the pages that its status process serves.

/healthz: the event loop runs, and no watch is silent while the API server answers. It does not
depend on the API server: while that is unreachable, a restart would only lose the cache.
/readyz:  the cluster is known; the leader serves, the other replicas could.
/leaderz: this process leads and serves.
/metrics: Prometheus, from a page that is at most a second old.

This module does not listen: `flyer.kube.servers.status` is a separate process, so that its clients
never run on the scheduler's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Final

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from flyer.kube.servers.status import EXIT_NO_PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from flyer.kube.metrics import Metrics
    from flyer.kube.services import ClusterCache, Leader

__all__ = ["Health", "PortTakenError"]

# A healthy watch receives an event or bookmark at least once a minute.
WATCH_AGE_SECONDS_MAX: Final = 90.0
# A step may wait for a slow API server, but its calls have deadlines.
TERM_AGE_SECONDS_MAX: Final = 120.0
TICK_SECONDS: Final = 0.25
FRAME_SECONDS: Final = 1.0
"""Maximum time between frames: the status process detects a stuck event loop by their age."""
WRITE_SECONDS_MAX: Final = 10.0
RESTART_SECONDS: Final = 1.0
END_SECONDS: Final = 2.0

log = logging.getLogger(__name__)


class PortTakenError(Exception):
    """The status process cannot bind its port."""


class Health:
    """Checks the health of this process and publishes it."""

    def __init__(
        self,
        cache: ClusterCache,
        leader: Leader,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._leader = leader
        self._metrics = metrics
        self._clock = clock
        self._wanted = asyncio.Event()

    def unhealthy_reason(self) -> str:
        """Why the process should be restarted; empty: it is healthy."""
        age = self._cache.age_seconds
        responding = self._metrics.answering_seconds()
        if age > WATCH_AGE_SECONDS_MAX and responding > WATCH_AGE_SECONDS_MAX:
            return f"a watch has been silent for {age:.0f} s while the API server responded"
        term = self._leader.term
        if term is not None and term.serving:
            stuck = self._clock() - term.ticked_at
            if stuck > TERM_AGE_SECONDS_MAX:
                return f"the scheduler has made no progress for {stuck:.0f} s"
        return ""

    def pages(self) -> dict[str, tuple[int, str]]:
        """Status code and text, by path."""
        term = self._leader.term
        leads = term is not None and term.serving
        failures = {
            "/healthz": self.unhealthy_reason(),
            "/readyz": "" if self._cache.synced else "the cluster is not listed yet",
            "/leaderz": "" if leads else "this replica does not lead",
        }
        return {path: (503 if why else 200, why or "ok") for path, why in failures.items()}

    async def run(self, host: str, port: int) -> None:
        """Keep the status process running until cancelled."""
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "flyer.kube.servers.status", host, str(port),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                await self._feed(process)
            except (OSError, TimeoutError) as error:
                log.warning("cannot send pages to the status process: %r", error)
            finally:
                await _end(process)
            if process.returncode == EXIT_NO_PORT:
                raise PortTakenError(f"port {port} for probes and metrics is already in use")
            log.error("the status process exited with status %s", process.returncode)
            await asyncio.sleep(RESTART_SECONDS)

    async def _feed(self, process: asyncio.subprocess.Process) -> None:
        """Send pages until the process ends."""
        asking = asyncio.create_task(self._listen(process))
        ended = asyncio.create_task(process.wait())
        sent_pages: dict[str, tuple[int, str]] = {}
        sent_at = -FRAME_SECONDS
        try:
            while not ended.done():
                pages = self.pages()
                now = self._clock()
                if pages != sent_pages or self._wanted.is_set() or now - sent_at >= FRAME_SECONDS:
                    await self._send(process, pages)
                    sent_pages, sent_at = pages, now
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_SECONDS):
                        await self._wanted.wait()
        finally:
            for task in (asking, ended):
                task.cancel()
            await asyncio.gather(asking, ended, return_exceptions=True)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while await process.stdout.readline():
            self._wanted.set()

    async def _send(
        self, process: asyncio.subprocess.Process, pages: dict[str, tuple[int, str]]
    ) -> None:
        assert process.stdin is not None
        frame: dict[str, object] = {"pages": pages}
        body = b""
        if self._wanted.is_set():
            self._wanted.clear()
            ages = ((cache.resource.plural, cache.age_seconds) for cache in self._cache.caches)
            self._metrics.set_watch_ages(ages)
            self._metrics.count()
            # In a thread: a large registry takes milliseconds of processor time.
            body = await asyncio.to_thread(generate_latest, self._metrics.registry)
            frame |= {"metrics": len(body), "type": CONTENT_TYPE_LATEST}
        process.stdin.write(json.dumps(frame).encode() + b"\n" + body)
        async with asyncio.timeout(WRITE_SECONDS_MAX):
            await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the status process: it exits at the end of its input, or is killed."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
