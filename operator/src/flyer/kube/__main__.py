"""`flyer-operator`: scheduler and gateway of the jobs.

A separate process serves probes and metrics (`flyer.kube.servers.status`), and `flyer-webhook` the
injection webhook, so that their clients do not run on the scheduler's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from typing import TYPE_CHECKING, Final

from flyer.kube.apiserver import AccessError, Api, Election, LeaseSettings, Limits, find_access
from flyer.kube.apiserver.token_reviews import TokenReviews
from flyer.kube.gateway import Gateway, GatewayMetrics, GatewaySettings, outcome_of
from flyer.kube.health import Health, PortTakenError
from flyer.kube.logs import write_json_logs
from flyer.kube.metrics import Metrics
from flyer.kube.pods import PodSettings
from flyer.kube.services import ClusterCache, Dependencies, Leader, LeaderMark, LeaderTerm
from flyer.kube.services.certificates import CertificateManager
from flyer.kube.services.nodes.probes import probe_node
from flyer.kube.settings import Settings, parse_settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from flyer.engine import Event, Node
    from flyer.kube.handlers import Handlers
    from flyer.kube.threefs.controller import ThreeFSClusters

__all__ = ["main", "operate"]

_GC_THRESHOLDS: Final = (100_000, 50, 100)
THREEFS_CONCURRENCY_MAX: Final = 4
"""Concurrent API calls for ThreeFSClusters."""


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Exit status 0; 2: the operator cannot start."""
    settings = parse_settings(arguments)
    # Millions of long-lived objects: a full garbage collection would stall the scheduler.
    gc.set_threshold(*_GC_THRESHOLDS)
    write_json_logs(settings.log_level)
    try:
        asyncio.run(operate(settings))
    except AccessError as error:
        sys.stderr.write(f"flyer-operator: {error}\n")
        return 2
    except BaseExceptionGroup as group:
        port_errors, other_errors = group.split(PortTakenError)
        if port_errors is None or other_errors is not None:
            raise
        sys.stderr.write(f"flyer-operator: {port_errors.exceptions[0]}\n")
        return 2
    return 0


async def operate(settings: Settings) -> None:
    """Run until a signal, then release the Lease."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    metrics = Metrics()
    access = await find_access(settings.kubeconfig, settings.context)
    limits = Limits(concurrency_max=settings.api_concurrency)
    holder = settings.holder
    agent = f"flyer-operator/{holder}"
    async with Api(access, agent=agent, limits=limits, observe=metrics.called) as api:
        work = asyncio.create_task(_Operator(settings, api, metrics, holder).run())
        ending = asyncio.create_task(stop.wait())
        await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


class _Operator:
    """Wiring of one process."""

    def __init__(self, settings: Settings, api: Api, metrics: Metrics, holder: str) -> None:
        self._settings = settings
        self._api = api
        self._metrics = metrics
        self._gateway: Gateway | None = None  # of the current or latest term
        self._term_api: Api | None = None  # fenced for that term
        self._gateway_metrics = GatewayMetrics(metrics.registry)
        self._certificates = CertificateManager(
            api,
            settings.namespace,
            settings.names,
            webhook=settings.webhook_names if settings.injection else (),
        )
        self._cache = ClusterCache(api, outcome_of)
        lease = LeaseSettings(
            namespace=settings.namespace,
            duration_seconds=settings.lease_seconds,
            renew_seconds=settings.renew,
            retry_seconds=settings.retry,
        )
        mark = LeaderMark(settings.namespace, settings.pod_name) if settings.pod_name else None
        self._leader = Leader(
            api, Election(api, holder, lease), self._cache, self._term, metrics, mark, self._handle
        )

    async def run(self) -> None:
        """Run until cancelled."""
        settings = self._settings
        health = Health(self._cache, self._leader, self._metrics)
        async with asyncio.TaskGroup() as group:
            group.create_task(health.run("", settings.metrics_port), name="health")
            group.create_task(self._cache.run(), name="world")
            group.create_task(self._freeze(), name="freeze")
            # The gateway needs a certificate, and pods are given its authority.
            group.create_task(self._certificates.run(), name="certificates")
            await self._certificates.ready.wait()
            group.create_task(self._leader.run(), name="leader")

    async def _freeze(self) -> None:
        """Exempt the initially listed objects from garbage collection: most of them stay."""
        await self._cache.wait_synced()
        gc.freeze()

    async def _handle(self, term: LeaderTerm) -> None:
        async with asyncio.TaskGroup() as group:
            if self._settings.handlers:
                group.create_task(self._handlers(term).run(), name="handlers")
            if self._settings.threefs_clusters and self._term_api is not None:
                group.create_task(self._threefs_clusters(self._term_api).run(), name="threefs")

    def _handlers(self, term: LeaderTerm) -> Handlers:
        from flyer.kube.handlers import Handlers

        def nodes() -> list[Node]:
            return [state.node for state in term.state.nodes.values()]

        return Handlers(nodes, kubeconfig=self._settings.kubeconfig)

    def _threefs_clusters(self, api: Api) -> ThreeFSClusters:
        from flyer.kube.threefs.controller import ThreeFSClusters
        from flyer.kube.threefs.settings import ClusterSettings

        settings = self._settings
        # Separate slots: its calls never delay those of the scheduler.
        slots = asyncio.Semaphore(THREEFS_CONCURRENCY_MAX)
        return ThreeFSClusters(
            api.with_limiter(slots),
            ClusterSettings(
                cluster_domain=settings.cluster_domain, metrics_port=settings.metrics_port
            ),
        )

    def _pod_settings(self) -> PodSettings:
        certificates = self._certificates.current
        assert certificates is not None, "certificates are not ready"
        return PodSettings.of(self._settings, certificates.bundle)

    def _make_gateway(self, enqueue: Callable[[Event], None]) -> Gateway:
        settings = self._settings
        gateway = Gateway(
            enqueue=enqueue,
            identities=TokenReviews(self._api),
            settings=GatewaySettings(host=settings.gateway_host, port=settings.gateway_port),
            metrics=self._gateway_metrics,
        )
        if self._gateway is not None:
            self._certificates.forget(self._gateway.use)
        self._gateway = gateway
        self._certificates.serve_with(gateway.use)
        return gateway

    def _term(
        self, api: Api, epoch: int, raise_epoch: Callable[[int], Awaitable[int]]
    ) -> LeaderTerm:
        self._term_api = api
        dependencies = Dependencies(
            pod_settings=self._pod_settings,
            outcome_of=outcome_of,
            make_gateway=self._make_gateway,
            probe=probe_node,
        )
        return LeaderTerm(
            api, self._cache, dependencies, self._settings.scheduler, self._metrics,
            epoch=epoch, raise_epoch=raise_epoch, instance=self._settings.instance,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
