"""In-process operators, in sequence or in parallel, on a real API server behind a proxy.

The proxy counts their calls, injects faults and closes connections. Nodes are simulated (no
kubelets), so that the lifecycle of two jobs takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyer.api import FlyerJobStatus, Phase
from flyer.engine import SchedulerSettings
from flyer.kube.apiserver import Access, Api, Cache, Election, LeaseSettings, find_access
from flyer.kube.apiserver.resources import FLYERJOBS, FLYERTOPOLOGIES, NODES
from flyer.kube.gateway import outcome_of
from flyer.kube.metrics import Metrics
from flyer.kube.pods import PodSettings
from flyer.kube.services import ClusterCache, Dependencies, Leader, LeaderTerm
from flyer.kube.services.nodes.probes import probe_node

from fakekube.apiserver.admission import acting
from fakekube.apiserver.impersonation import Impersonation
from fakekube.leaks import nothing_left
from fakekube.real_server.api_nodes import ApiNodes
from fakekube.real_server.fake_gateway import FakeGateway
from fakekube.real_server.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from testcluster.handle import Cluster

__all__ = ["Operators", "Stage", "staged"]

CRDS = Path(__file__).parents[2] / "crds"
OPERATOR = "system:serviceaccount:fireflyer-system:flyer-operator"
SETTINGS = PodSettings(controller_image="c", collectives_image="l", gateway_ca="ca")
SCHEDULER_SETTINGS = replace(
    SchedulerSettings(),
    failure_window_seconds=0.3,
    same_zone_layout_seconds=0.2,
    backoff_seconds=0.05,
    backoff_seconds_max=0.2,
    stop_retry_seconds=1.0,
)
STEP_SECONDS = 100.0


class Operators:
    """One after the other, over the same objects."""

    def __init__(self, proxy: Proxy, nodes: ApiNodes, namespace: str) -> None:
        self._proxy, self._nodes = proxy, nodes
        self._lease = LeaseSettings(
            namespace=namespace, duration_seconds=2, renew_seconds=1.4, retry_seconds=0.1
        )
        self._reports: dict[tuple[str, int], list[Any]] = {}  # what sidecars keep
        self._running: dict[str, tuple[asyncio.Task[None], Api]] = {}

    def start(self) -> str:
        """Another process; its name."""
        name = f"operator-{secrets.token_hex(4)}"
        api = Api(Access(self._proxy.url), agent=name)
        cache = ClusterCache(api, outcome_of)
        metrics = Metrics()

        def make_term(api: Api, epoch: int, raise_epoch: Any) -> LeaderTerm:
            dependencies = Dependencies(
                pod_settings=lambda: SETTINGS,
                outcome_of=outcome_of,
                # The pods of `ApiNodes` have no processes, so no sidecar connects.
                make_gateway=lambda enqueue: FakeGateway(enqueue, self._nodes, self._reports),
                probe=probe_node,
            )
            return LeaderTerm(
                api,
                cache,
                dependencies,
                SCHEDULER_SETTINGS,
                metrics,
                epoch=epoch,
                raise_epoch=raise_epoch,
            )

        leader = Leader(api, Election(api, name, self._lease), cache, make_term, metrics)

        async def run() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(cache.run())
                group.create_task(leader.run())

        self._running[name] = (asyncio.create_task(run(), name=name), api)
        return name

    def kill(self, name: str) -> None:
        """Stops it as SIGKILL does: without a message and without releasing the Lease."""
        self._proxy.faults.dead.add(name)
        self._running[name][0].cancel()

    def state(self) -> str:
        """The state of the running operator, as text."""
        name, (task, _) = list(self._running.items())[-1]
        ended = f"ended by {task.exception()!r}" if task.done() else "runs"
        return f"{name} {ended}; {len(self._running)} in all"

    async def end(self) -> None:
        """All of them."""
        for task, api in list(self._running.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
                await task
            await api.close()


class Stage:
    """Two nodes of a separate class, and the reports of their jobs."""

    def __init__(self, api: Api, proxy: Proxy, namespace: str) -> None:
        self.api, self.namespace, self.proxy = api, namespace, proxy
        self.node_class = f"g{secrets.token_hex(3)}"
        self.nodes = ApiNodes(api)
        self.jobs: Cache[FlyerJobStatus] = Cache(api, FLYERJOBS, _status_of, lambda *_: None)
        self.operators = Operators(proxy, self.nodes, namespace)

    async def submit(self, name: str, priority: str) -> None:
        """A job of two nodes."""
        container = {"name": "trainer", "image": "i", "command": ["train"]}
        spec = {
            "nodes": 2,
            "nodeClass": self.node_class,
            "priority": priority,
            "preemption": {
                "checkpointGracePeriod": "30s",
                "maxCheckpointGracePeriod": "60s",
                "minRuntime": "0s",
            },
            "template": {"spec": {"containers": [container]}},
        }
        metadata = {"name": name, "namespace": self.namespace}
        kind = {"apiVersion": "fireflyer.dev/v1alpha1", "kind": "FlyerJob"}
        await self.api.create(
            FLYERJOBS, {**kind, "metadata": metadata, "spec": spec}, self.namespace
        )

    def status(self, name: str) -> FlyerJobStatus:
        """As it is stored."""
        return self.jobs.get(self.namespace, name) or FlyerJobStatus()

    def is_gone(self, name: str) -> bool:
        """Whether none of its processes runs."""
        return not self.status(name).occupied

    async def until(self, description: str, holds: Callable[[], object]) -> None:
        """Waits for it."""
        try:
            async with asyncio.timeout(STEP_SECONDS):
                while not holds():  # noqa: ASYNC110 - no notification exists
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not within {STEP_SECONDS:g} s: {description}") from None

    async def live(self, low: str, high: str) -> None:
        """The second job preempts the first one and ends; then the first one resumes and ends."""

        def phase(name: str, expected: Phase) -> Callable[[], bool]:
            return lambda: self.status(name).phase is expected

        await self.submit(low, "low")
        await self.until(f"{low} runs", phase(low, Phase.RUNNING))
        await self.submit(high, "high")
        await self.until(f"{high} runs", phase(high, Phase.RUNNING))
        self.nodes.finish_job(self.namespace, high, 1)
        await self.until(f"{low} runs again", phase(low, Phase.RUNNING))
        self.nodes.finish_job(self.namespace, low, 2)
        for name, attempts in ((low, 2), (high, 1)):
            await self.until(f"{name} has ended", phase(name, Phase.SUCCEEDED))
            await self.until(f"{name} is gone", partial(self.is_gone, name))
            history = self.status(name).history
            assert (history.attempt, history.restarts) == (attempts, 0), self.status(name).eviction
        checkpoint = self.status(low).checkpoint
        assert checkpoint is not None
        assert checkpoint.step == 1, "the step that was saved at the preemption, and no other"


def _status_of(value: dict[str, Any]) -> FlyerJobStatus:
    return FlyerJobStatus.model_validate(value.get("status") or {})


@contextlib.asynccontextmanager
async def staged(control_plane: Cluster, namespace: str) -> AsyncIterator[Stage]:
    """A stage on this control plane; removed completely afterwards."""
    control_plane.kubectl("apply", "--server-side", "-f", str(CRDS))
    control_plane.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all", deadline_s=70
    )
    admin = await find_access(control_plane.kubeconfig)

    # The admission policies allow no other account to write statuses.
    access = Impersonation(admin, acting(OPERATOR, "system:masters"))
    async with nothing_left(), Proxy(access) as proxy, Api(access, agent="test") as api:
        stage = Stage(api, proxy, namespace)
        for name in ("a0", "a1"):
            await stage.nodes.add(f"{stage.node_class}-{name}", "A", stage.node_class)
        tasks = [asyncio.create_task(item.run()) for item in (stage.nodes, stage.jobs)]
        yield stage
        proxy.faults.clear()  # no other operator is killed
        await stage.operators.end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for topology in await api.list(FLYERTOPOLOGIES):
            await api.delete(FLYERTOPOLOGIES, topology["metadata"]["name"])
        for node in await api.list(
            NODES, labelSelector=f"fireflyer.dev/node-class={stage.node_class}"
        ):
            await api.delete(NODES, node["metadata"]["name"])
