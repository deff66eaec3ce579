"""An in-memory cluster with operators that can be killed, and its invariants."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import pytest
from flyer.api import FlyerJobStatus, Phase
from flyer.engine import SchedulerSettings
from flyer.kube.apiserver import Access, Api, Election, LeaseSettings, Limits, WatchSettings
from flyer.kube.apiserver.token_reviews import TokenReviews
from flyer.kube.gateway import (
    Gateway,
    GatewayMetrics,
    GatewaySettings,
    certificates_of,
    outcome_of,
    renewed,
)
from flyer.kube.metrics import Metrics
from flyer.kube.pods import PodSettings
from flyer.kube.services import ClusterCache, Dependencies, Leader, LeaderTerm

from fakekube import ApiServer, Kubelets
from fakekube.apiserver.admission import OPERATOR, User
from fakekube.leaks import nothing_left
from fakekube.nodes.containers import Containers
from fakekube.nodes.network import PodNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SCHEDULER_SETTINGS = SchedulerSettings(
    failure_window_seconds=0.3, start_deadline_seconds=110.0, stop_retry_seconds=1.0,
    same_zone_layout_seconds=0.2, backoff_seconds=0.05, backoff_seconds_max=0.2,
    refused_backoff_seconds=0.1, start_backoff_seconds=0.1, progress_commit_seconds=0.2,
)  # fmt: skip
LEASE = LeaseSettings(
    namespace="fireflyer-system", duration_seconds=2, renew_seconds=1.4, retry_seconds=0.1
)
LIMITS = Limits(answer_seconds=2.0, call_seconds=5.0, backoff_seconds=0.01)
SERVICE = "flyer-gateway.fireflyer-system.svc"
CERTIFICATES = certificates_of(renewed(None, [SERVICE], datetime.now(UTC)))
POD_SETTINGS = PodSettings(
    controller_image="c", collectives_image="l", gateway_ca=CERTIFICATES.bundle
)
GATEWAY = GatewaySettings(
    host="127.0.0.1",
    port=0,
    hello_seconds=30,  # a handshake may take long on a busy host
    review_seconds=30,
    silence_seconds=60,
    progress_seconds=0.02,
    first_failure_seconds=0.05,
    peer_lost_seconds=0.1,
    status_seconds=0.1,
    account_seconds=0.5,
)


class Operator:
    """One process of the operator."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        scheduler_settings: SchedulerSettings,
        lease: LeaseSettings,
    ) -> None:
        self.name = name
        self.metrics = Metrics()
        self._gateway_metrics = GatewayMetrics(self.metrics.registry)
        self.gateway: Gateway | None = None  # of the current or latest term
        self._cluster = cluster
        self._scheduler_settings = scheduler_settings
        self.api = Api(
            Access(cluster.server.url), agent=name, limits=LIMITS, observe=self.metrics.called
        )
        self.cache = ClusterCache(self.api, outcome_of, WatchSettings(backoff_seconds=0.01))
        self.election = Election(self.api, name, lease)
        self.leader = Leader(self.api, self.election, self.cache, self._term, self.metrics)
        self.task = asyncio.create_task(self._run(), name=name)

    @property
    def serves(self) -> bool:
        return self.leader.term is not None and self.leader.term.serving

    def kill(self) -> None:
        """Stop as by SIGKILL: nothing is reported or released."""
        self._cluster.server.faults.dead.add(self.name)
        self.task.cancel()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.cache.run())
            group.create_task(self.leader.run())

    def _term(self, api: Api, epoch: int, raise_epoch: Any) -> LeaderTerm:
        def make_gateway(enqueue: Any) -> Gateway:
            self.gateway = Gateway(
                enqueue=enqueue,
                identities=TokenReviews(self.api),
                settings=self._cluster.gateway_settings,
                metrics=self._gateway_metrics,
            )
            self.gateway.use(CERTIFICATES)
            return self.gateway

        dependencies = Dependencies(
            pod_settings=lambda: POD_SETTINGS,
            outcome_of=outcome_of,
            make_gateway=make_gateway,
            probe=lambda address, _port: self._cluster.kubelets.answers(address),
        )
        return LeaderTerm(
            api, self.cache, dependencies, self._scheduler_settings, self.metrics,
            epoch=epoch, raise_epoch=raise_epoch,
        )  # fmt: skip

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self.task
        await self.api.close()


class Cluster:
    """The API server, its nodes, and operators."""

    def __init__(self) -> None:
        self.server = ApiServer(bookmark_seconds=0.2, user=User(OPERATOR))
        self.network = PodNetwork()
        self.network.services[SERVICE] = self._leaders_port
        self.containers = Containers(self.server.tokens, self.network)
        self.kubelets = Kubelets(self.server.store, containers=self.containers)
        self.gateway_settings = GATEWAY
        self.store = self.server.store
        self.operators: list[Operator] = []
        self.violations: list[str] = []
        self._count = 0
        self._epochs: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        await self.server.start()
        self.kubelets.open()
        for plural in ("pods", "flyerjobs", "flyertopologies"):
            self.store.table(plural).watchers.add(self._check)
        return self

    async def __aexit__(self, *_: object) -> None:
        for operator in self.operators:
            await operator.end()
        await self.kubelets.close()
        await self.server.close()
        assert not self.violations, self.violations

    # -- actions of tests ----------------------------------------------------------------------

    def nodes(self, *zones: str, answers_probes: bool = False, **details: Any) -> None:
        """Add one node per letter, such as "AAAB"."""
        for zone in "".join(zones):
            if answers_probes:
                details["address"] = f"192.0.2.{len(self.store.all('nodes')) + 1}"
            number = sum(
                node["metadata"]["name"].startswith(zone.lower())
                for node in self.store.all("nodes")
            )
            self.kubelets.add_node(f"{zone.lower()}{number}", zone, **details)

    def operator(self, lease: LeaseSettings = LEASE, **scheduler_settings: Any) -> Operator:
        """Start another process; `scheduler_settings` changes the engine's settings."""
        self._count += 1
        name = f"operator-{self._count}"
        operator = Operator(
            self,
            name,
            scheduler_settings=replace(SCHEDULER_SETTINGS, **scheduler_settings),
            lease=lease,
        )
        self.operators.append(operator)
        return operator

    def submit(self, name: str, nodes: int = 1, namespace: str = "default", **spec: Any) -> None:
        template = {
            "spec": {"containers": [{"name": "trainer", "image": "i", "command": ["train"]}]}
        }
        preemption = {
            "checkpointGracePeriod": "5s",
            "maxCheckpointGracePeriod": "10s",
            "minRuntime": "0s",
        }
        body = {"nodes": nodes, "preemption": preemption, "template": template, **spec}
        self.store.create("flyerjobs", {"metadata": {"name": name}, "spec": body}, namespace)

    def edit(self, name: str, **spec: Any) -> None:
        self.store.patch("flyerjobs", name, {"spec": spec}, "default")

    def status(self, name: str, namespace: str = "default") -> FlyerJobStatus:
        value = self.store.find("flyerjobs", name, namespace)
        if value is None or "status" not in value:
            return FlyerJobStatus(reason="none")
        return FlyerJobStatus.model_validate(value["status"])

    def phase(self, name: str) -> Phase:
        return self.status(name).phase

    def pods(self, name: str = "", *, living: bool = True) -> list[dict[str, Any]]:
        return [
            pod
            for pod in self.store.all("pods")
            if (not name or pod["metadata"].get("labels", {}).get("fireflyer.dev/job") == name)
            and (not living or pod["status"]["phase"] in ("Pending", "Running"))
        ]

    def finish(self, name: str, end: Any = None) -> None:
        for pod in self.pods(name):
            self.kubelets.finish("default", pod["metadata"]["name"], end)

    def _leaders_port(self) -> int:
        """The endpoint of the gateway's Service: the newest leading operator."""
        for operator in reversed(self.operators):
            if operator.serves and operator.gateway is not None and operator.gateway.port:
                return operator.gateway.port
        raise ConnectionRefusedError("no operator leads")

    # -- invariants ----------------------------------------------------------------------------

    def _check(self, change: Any) -> None:
        for why in self.broken():
            if why not in self.violations:
                self.violations.append(why)

    def broken(self) -> list[str]:
        """All violated invariants."""
        violations = []
        living: dict[str, set[str]] = {}
        for pod in self.pods():
            if "foreign" in pod["metadata"].get("annotations", {}):
                continue  # created by a test
            node = pod["spec"].get("nodeName")
            if node and node not in self.kubelets.stopped_nodes:
                labels = pod["metadata"]["labels"]
                key = f"{labels['fireflyer.dev/job']}-{labels['fireflyer.dev/attempt']}"
                living.setdefault(node, set()).add(key)
                violations += self._undecided(pod, node)
        violations += [
            f"{node} serves {sorted(jobs)}" for node, jobs in living.items() if len(jobs) > 1
        ]
        reserved: Counter[str] = Counter()
        for value in self.store.all("flyerjobs"):
            status = FlyerJobStatus.model_validate(value.get("status") or {})
            if status.phase in (Phase.RESERVED, Phase.DRAINING, Phase.STARTING, Phase.RUNNING):
                assert status.assignment is not None
                if len(set(status.assignment.names)) != value["spec"]["nodes"]:
                    violations.append(f"{value['metadata']['name']} has part of its nodes")
                reserved.update(status.assignment.names)
            if status.phase is Phase.RUNNING:
                violations += self._gang(value["metadata"]["name"], status)
        violations += [f"{node} is reserved {n} times" for node, n in reserved.items() if n > 1]
        return violations

    def _undecided(self, pod: dict[str, Any], node: str) -> list[str]:
        """A pod is bound only to a node in its job's stored status."""
        labels, namespace = pod["metadata"]["labels"], pod["metadata"]["namespace"]
        job = self.store.find("flyerjobs", labels["fireflyer.dev/job"], namespace)
        owner = pod["metadata"]["ownerReferences"][0]["uid"]
        if job is None or job["metadata"]["uid"] != owner:
            return []
        occupied = (job.get("status") or {}).get("occupied", [])
        attempt = int(labels["fireflyer.dev/attempt"])
        if any(item["name"] == node and item["attempt"] == attempt for item in occupied):
            return []
        return [f"{pod['metadata']['name']} runs on {node}, which no status assigns"]

    def _gang(self, name: str, status: FlyerJobStatus) -> list[str]:
        """The bound pods of a running gang are on its nodes, one per node."""
        assert status.assignment is not None
        return [
            f"{pod['metadata']['name']} is on {pod['spec'].get('nodeName')}"
            for pod in self.pods(name)
            if "foreign" not in pod["metadata"].get("annotations", {})
            and pod["metadata"]["labels"]["fireflyer.dev/attempt"] == str(status.history.attempt)
            and pod["spec"].get("nodeName")
            != status.assignment.names[int(pod["metadata"]["labels"]["fireflyer.dev/node-rank"])]
        ]


@pytest.fixture
async def api_server() -> AsyncIterator[ApiServer]:
    async with ApiServer(bookmark_seconds=0.1, user=User(OPERATOR)) as server:
        yield server


@pytest.fixture
async def connect(api_server: ApiServer) -> AsyncIterator[Callable[..., Api]]:
    """`connect(agent, **limits)`: another client of the operator."""
    opened: list[Api] = []

    def make(agent: str = "test", **limits: float) -> Api:
        api = Api(Access(api_server.url), agent=agent, limits=Limits(**limits))
        opened.append(api)
        return api

    yield make
    for api in opened:
        await api.close()


@pytest.fixture
def until() -> Callable[..., object]:
    """Wait for a condition; a busy host may need more than a minute."""

    async def wait(holds: Callable[[], object], seconds: float = 100.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"condition did not hold within {seconds:g} s") from None

    return wait


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A cluster without nodes and operators."""
    async with nothing_left(), Cluster() as cluster:
        yield cluster


@pytest.fixture
def make_cluster() -> type[Cluster]:
    """Clusters without nodes and operators, as context managers."""
    return Cluster
