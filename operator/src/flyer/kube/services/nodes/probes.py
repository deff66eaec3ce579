"""Node prober: connects to silent nodes for the failure detector."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from flyer.kube.services.nodes.failure_detector import TICK_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from flyer.kube.cache.cluster_cache import ClusterCache
    from flyer.kube.services.dependencies import Gateway, Probe
    from flyer.kube.services.nodes.nodes import Nodes

__all__ = ["PROBE_SECONDS", "NodeProber", "probe_node"]

PROBE_SECONDS: Final = 1.8
"""TCP retransmits a SYN after one second: two lost SYNs are rarely a coincidence."""
CONCURRENCY_MAX: Final = 16
# Errors that mean no answer; all others are local (no descriptor, no network).
_UNANSWERED: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN})
_REFUSED: Final = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})

log = logging.getLogger(__name__)


def probe_node(address: str, port: int) -> bool | None:
    """Whether a node answers; a refused connection is an answer. None: unknown."""
    try:
        socket.create_connection((address, port), PROBE_SECONDS).close()
    except TimeoutError:
        return False
    except OSError as error:
        if error.errno in _REFUSED:
            return True
        return False if error.errno in _UNANSWERED else None
    return True


class NodeProber:
    """Probes silent nodes during one term."""

    def __init__(
        self,
        cache: ClusterCache,
        gateway: Gateway,
        nodes: Nodes,
        probe: Probe,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._cache = cache
        self._gateway = gateway
        self._nodes = nodes
        self._probe_node = probe
        self._spawn = spawn

    async def run(self) -> None:
        """Probe until cancelled, in dedicated threads, which a busy event loop does not delay."""
        loop, detector = asyncio.get_running_loop(), self._nodes.failure_detector
        # Two pools: a thousand nodes behind a firewall must not delay probes of other nodes.
        responding, unknown = (
            ThreadPoolExecutor(CONCURRENCY_MAX, "probe"),
            ThreadPoolExecutor(CONCURRENCY_MAX, "first"),
        )
        try:
            while True:
                for node in detector.tick(self._gateway.heartbeats(), loop.time()):
                    threads = responding if detector.has_answered(node) else unknown
                    self._spawn(self._probe(node, threads), f"probe {node}")
                self._nodes.evaluate()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for threads in (responding, unknown):
                threads.shutdown(wait=False, cancel_futures=True)

    async def _probe(self, node: str, threads: ThreadPoolExecutor) -> None:
        view = self._cache.nodes.get("", node)
        response = None
        if view is not None and view.address:
            try:
                response = await asyncio.get_running_loop().run_in_executor(
                    threads, self._probe_node, view.address, view.port
                )
            except Exception:  # an invalid address or a missing thread: inconclusive
                log.exception("node %s: cannot probe %s", node, view.address)
        if not response:
            log.debug("node %s: no answer to a probe (%s)", node, response)
        self._nodes.failure_detector.probed(node, answered=response)
