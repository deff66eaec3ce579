"""kopf in a thread of its own, with a loop of its own: what it does cannot hold up the scheduler.

Only `on.event` handlers: they keep no state in the objects and add no finalizer, so that nothing
blocks when the operator is gone. Their writes are to status conditions and happen on changes alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from flyer.api.names import GROUP, PLURAL_QUOTAS, PLURAL_TOPOLOGIES, VERSION
from flyer.kube.handlers.verdicts import condition_patch, quota_verdict, topology_verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import kopf

    from flyer.engine import Node

__all__ = ["Handlers"]

STOP_SECONDS: Final = 5.0
# Watches: the server ends them by itself, and connections to it are tried for so long.
WATCH_SECONDS: Final = 300
CONNECT_SECONDS: Final = 5.0
REQUEST_SECONDS: Final = 10.0
RESTART_SECONDS: Final = 5.0
WAIT_SECONDS: Final = 0.5  # between two looks whether the thread is still wanted

log = logging.getLogger(__name__)


class Handlers:
    """Runs while this process leads.

    `nodes` is asked in kopf's thread, for a value that is never changed in place.
    """

    # One thread of kopf in this process at a time: one that does not stop outlives its term.
    _serving = threading.Lock()

    def __init__(self, nodes: Callable[[], Collection[Node]], *, kubeconfig: str = "") -> None:
        self._nodes = nodes
        self._kubeconfig = kubeconfig

    async def run(self) -> None:
        """Until cancelled. An error of kopf's is logged, and kopf started again."""
        while True:
            stop = threading.Event()
            work = asyncio.to_thread(self._run, stop)
            task = asyncio.create_task(work)
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                stop.set()
                await asyncio.wait([task], timeout=STOP_SECONDS)
                raise
            except Exception:
                log.exception("the handlers failed: they are started again")
            await asyncio.sleep(RESTART_SECONDS)

    def _run(self, stop: threading.Event) -> None:
        """Serve in this thread, once the thread of an earlier term has ended."""
        while not self._serving.acquire(timeout=WAIT_SECONDS):
            if stop.is_set():
                return
        try:
            if not stop.is_set():
                self._serve(stop)
        finally:
            self._serving.release()

    def _serve(self, stop: threading.Event) -> None:
        import kopf  # takes half a second, and only leaders need it

        if self._kubeconfig:
            os.environ["KUBECONFIG"] = self._kubeconfig
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.watching.server_timeout = WATCH_SECONDS
        settings.watching.connect_timeout = CONNECT_SECONDS
        settings.networking.request_timeout = REQUEST_SECONDS
        asyncio.run(
            kopf.operator(
                registry=self._registry(stop),
                settings=settings,
                standalone=True,
                clusterwide=True,
                stop_flag=stop,
            )
        )

    def _registry(self, stop: threading.Event) -> kopf.OperatorRegistry:
        import kopf

        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        def _login(**context: Any) -> kopf.ConnectionInfo | None:
            in_cluster = None if self._kubeconfig else kopf.login_with_service_account(**context)
            return in_cluster or kopf.login_with_kubeconfig(**context)

        def judge(verdict: Any) -> Any:
            def handler(
                type: str | None,  # noqa: A002 - kopf's name
                body: kopf.Body,
                patch: kopf.Patch,
                **_: Any,
            ) -> None:
                if type == "DELETED" or stop.is_set():
                    return  # the term is over: the next leader writes
                found = condition_patch(body, verdict(body, self._nodes()), time.time())
                if found is not None:
                    patch.status.update(found)

            return handler

        for plural, verdict in (
            (PLURAL_QUOTAS, quota_verdict),
            (PLURAL_TOPOLOGIES, topology_verdict),
        ):
            kopf.on.event(GROUP, VERSION, plural, id=plural, registry=registry)(judge(verdict))
        return registry
