"""Runs kopf in a separate thread with its own event loop, so that it cannot block the scheduler.

Only `on.event` handlers are used: they store no state in the objects and add no finalizer, so that
deletions do not block while the operator is absent. They write status conditions, only on changes.
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
# Timeouts of watches and of connections to the API server.
WATCH_SECONDS: Final = 300
CONNECT_SECONDS: Final = 5.0
REQUEST_SECONDS: Final = 10.0
RESTART_SECONDS: Final = 5.0
WAIT_SECONDS: Final = 0.2  # between checks whether the thread is still needed

log = logging.getLogger(__name__)


class Handlers:
    """Runs the handlers while this process leads.

    `nodes` is called in kopf's thread and must return an immutable value.
    """

    # One kopf thread per process: a thread that does not stop may outlive its term.
    _serving = threading.Lock()

    def __init__(self, nodes: Callable[[], Collection[Node]], *, kubeconfig: str = "") -> None:
        self._nodes = nodes
        self._kubeconfig = kubeconfig

    async def run(self) -> None:
        """Run until cancelled. kopf is restarted after an error."""
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
                log.exception("the kopf handlers failed, restarting them")
            await asyncio.sleep(RESTART_SECONDS)

    def _run(self, stop: threading.Event) -> None:
        """Serve in this thread once the thread of an earlier term has ended."""
        while not self._serving.acquire(timeout=WAIT_SECONDS):
            if stop.is_set():
                return
        try:
            if not stop.is_set():
                self._serve(stop)
        finally:
            self._serving.release()

    def _serve(self, stop: threading.Event) -> None:
        import kopf  # imported lazily: it takes half a second, and only leaders need it

        if self._kubeconfig:
            os.environ["KUBECONFIG"] = self._kubeconfig
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.watching.server_timeout = WATCH_SECONDS
        settings.watching.connect_timeout = CONNECT_SECONDS
        settings.networking.request_timeout = REQUEST_SECONDS

        async def serve() -> None:
            # Not `stop` itself: kopf would leave a thread waiting for it when it fails, and the
            # event loop could not be closed.
            flag = asyncio.Event()
            raising = asyncio.create_task(_raise_flag(stop, flag))
            await kopf.operator(
                registry=self._registry(stop),
                settings=settings,
                standalone=True,
                clusterwide=True,
                stop_flag=flag,
            )
            raising.cancel()

        asyncio.run(serve())

    def _registry(self, stop: threading.Event) -> kopf.OperatorRegistry:
        import kopf

        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        def _login(**context: Any) -> kopf.ConnectionInfo | None:
            in_cluster = None if self._kubeconfig else kopf.login_with_service_account(**context)
            return in_cluster or kopf.login_with_kubeconfig(**context)

        def handler_for(verdict: Any) -> Any:
            def handler(
                type: str | None,  # noqa: A002 - kopf's name
                body: kopf.Body,
                patch: kopf.Patch,
                **_: Any,
            ) -> None:
                if type == "DELETED" or stop.is_set():
                    return  # the term is over: the next leader writes
                status = condition_patch(body, verdict(body, self._nodes()), time.time())
                if status is not None:
                    patch.status.update(status)

            return handler

        for plural, verdict in (
            (PLURAL_QUOTAS, quota_verdict),
            (PLURAL_TOPOLOGIES, topology_verdict),
        ):
            kopf.on.event(GROUP, VERSION, plural, id=plural, registry=registry)(
                handler_for(verdict)
            )
        return registry


async def _raise_flag(stop: threading.Event, flag: asyncio.Event) -> None:
    while not stop.is_set():  # noqa: ASYNC110 - set in another thread
        await asyncio.sleep(WAIT_SECONDS)
    flag.set()
