"""Asks machines whether they live, once their jobs have fallen silent (`silence` says when)."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from flyer.kube.services.silence import LOOK_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from flyer.kube.services.nodes import Nodes
    from flyer.kube.services.seams import Gateway, Probe
    from flyer.kube.services.world import World

__all__ = ["PROBE_SECONDS", "Probes", "answers"]

PROBE_SECONDS: Final = 1.8
"""A connection's second attempt goes out after one: both may be lost, but not by chance."""
AT_ONCE: Final = 16
# What says that nobody is there; any other failure is our own (no descriptor, no network).
_UNANSWERED: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN})
_REFUSED: Final = frozenset({errno.ECONNREFUSED, errno.ECONNRESET})

log = logging.getLogger(__name__)


def answers(address: str, port: int) -> bool | None:
    """Whether a machine answers: a refused connection is an answer. None: that is not known."""
    try:
        socket.create_connection((address, port), PROBE_SECONDS).close()
    except TimeoutError:
        return False
    except OSError as error:
        if error.errno in _REFUSED:
            return True
        return False if error.errno in _UNANSWERED else None
    return True


class Probes:
    """Looks at the gateway's streams until cancelled. Of one term."""

    def __init__(
        self,
        world: World,
        gateway: Gateway,
        nodes: Nodes,
        ask: Probe,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._world = world
        self._gateway = gateway
        self._nodes = nodes
        self._ask = ask
        self._spawn = spawn

    async def run(self) -> None:
        """Threads of our own: an answer is seen in time although the event loop is busy."""
        loop, silence = asyncio.get_running_loop(), self._nodes.silence
        # Of two kinds: a thousand machines behind a wall keep no silent one waiting.
        known, unknown = ThreadPoolExecutor(AT_ONCE, "probe"), ThreadPoolExecutor(AT_ONCE, "first")
        try:
            while True:
                for node in silence.look(self._gateway.heard(), loop.time()):
                    threads = known if silence.answers(node) else unknown
                    self._spawn(self._probe(node, threads), f"probe {node}")
                self._nodes.judge()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            for threads in (known, unknown):
                threads.shutdown(wait=False, cancel_futures=True)

    async def _probe(self, node: str, threads: ThreadPoolExecutor) -> None:
        view = self._world.nodes.get("", node)
        answered = None
        if view is not None and view.address:
            try:
                answered = await asyncio.get_running_loop().run_in_executor(
                    threads, self._ask, view.address, view.port
                )
            except Exception:  # an address that is none, no thread: that says nothing of the node
                log.exception("node %s: no probe of %s", node, view.address)
        if not answered:
            log.debug("node %s: a probe was not answered (%s)", node, answered)
        self._nodes.silence.probed(node, answered=answered)
