"""The scheduler against a real API server: its validation, patches and watches.

Without kubelets: `ApiNodes` writes the statuses. Skipped without a built control plane.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flyer.api import FlyerJobStatus, Phase
from flyer.engine import CheckpointReported, SchedulerSettings
from flyer.kube.apiserver import Api, Cache, Election, LeaseSettings, find_access
from flyer.kube.apiserver.resources import FLYERJOBS, FLYERTOPOLOGIES, NODES
from flyer.kube.gateway import outcome_of
from flyer.kube.metrics import Metrics
from flyer.kube.pods import PodSettings
from flyer.kube.services import ClusterCache, Dependencies, Leader, LeaderTerm
from flyer.kube.services.nodes.probes import probe_node

from fakekube.apiserver.admission import acting
from fakekube.apiserver.impersonation import Impersonation
from fakekube.real_server.api_nodes import ApiNodes
from fakekube.real_server.fake_gateway import FakeGateway

CRDS = Path(__file__).parents[4] / "crds"
OPERATOR = "system:serviceaccount:fireflyer-system:flyer-operator"
SETTINGS = PodSettings(controller_image="c", collectives_image="l", gateway_ca="ca")
SCHEDULER_SETTINGS = replace(
    SchedulerSettings(), failure_window_seconds=0.5, same_zone_layout_seconds=0.5
)


class Scene:
    """An operator and nodes in a namespace of a real API server."""

    def __init__(self, api: Api, namespace: str, node_class: str) -> None:
        self.api, self.namespace, self.node_class = api, namespace, node_class
        self.nodes = ApiNodes(api)
        self.gateway: FakeGateway | None = None
        self.jobs: Cache[FlyerJobStatus] = Cache(api, FLYERJOBS, _status_of, lambda *_: None)
        self.cache = ClusterCache(api, outcome_of)
        # Other tests raise the epoch on the same objects.
        lease = LeaseSettings(
            namespace=namespace, duration_seconds=4, renew_seconds=3, retry_seconds=0.5
        )
        self.metrics = Metrics()
        election = Election(api, "test", lease)
        self.leader = Leader(api, election, self.cache, self._term, self.metrics)

    def _term(self, api: Api, epoch: int, raise_epoch: Any) -> LeaderTerm:
        def make_gateway(enqueue: Any) -> Any:
            # The pods of `ApiNodes` have no processes, so no sidecar connects.
            self.gateway = FakeGateway(enqueue, self.nodes)
            return self.gateway

        dependencies = Dependencies(
            pod_settings=lambda: SETTINGS,
            outcome_of=outcome_of,
            make_gateway=make_gateway,
            probe=probe_node,
        )
        return LeaderTerm(
            api,
            self.cache,
            dependencies,
            SCHEDULER_SETTINGS,
            self.metrics,
            epoch=epoch,
            raise_epoch=raise_epoch,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for work in (self.nodes, self.jobs, self.cache, self.leader):
                group.create_task(work.run())

    async def add_node(self, name: str, zone: str, *, dedicated: bool = True) -> None:
        await self.nodes.add(name, zone, self.node_class, dedicated=dedicated)

    async def submit(self, name: str, nodes: int, **spec: Any) -> None:
        template = {
            "spec": {"containers": [{"name": "trainer", "image": "i", "command": ["train"]}]}
        }
        preemption = {
            "checkpointGracePeriod": "30s",
            "maxCheckpointGracePeriod": "60s",
            "minRuntime": "0s",
        }
        body = {"nodes": nodes, "nodeClass": self.node_class, "preemption": preemption,
                "template": template, **spec}  # fmt: skip
        job = {"apiVersion": "fireflyer.dev/v1alpha1", "kind": "FlyerJob",
               "metadata": {"name": name, "namespace": self.namespace}, "spec": body}  # fmt: skip
        await self.api.create(FLYERJOBS, job, self.namespace)

    async def edit(self, name: str, **spec: Any) -> None:
        await self.api.merge(FLYERJOBS, name, {"spec": spec}, self.namespace)

    def status(self, name: str) -> FlyerJobStatus:
        return self.jobs.get(self.namespace, name) or FlyerJobStatus()

    def finish(self, name: str) -> None:
        self.nodes.finish_job(self.namespace, name, self.status(name).history.attempt)


def _status_of(value: dict[str, Any]) -> FlyerJobStatus:
    return FlyerJobStatus.model_validate(value.get("status") or {})


@pytest.fixture
async def scene(control_plane, namespace):
    control_plane.kubectl("apply", "--server-side", "-f", str(CRDS))
    control_plane.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all", deadline_s=70
    )
    admin = await find_access(control_plane.kubeconfig)

    # The admission policies allow only the operator to write statuses.
    access = Impersonation(admin, acting(OPERATOR, "system:masters"))
    async with Api(access, agent="operator") as api:
        started = Scene(api, namespace, f"g{secrets.token_hex(3)}")
        task = asyncio.create_task(started.run())
        yield started
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await task
        for topology in await api.list(FLYERTOPOLOGIES):
            await api.delete(FLYERTOPOLOGIES, topology["metadata"]["name"])
        for node in await api.list(
            NODES, labelSelector=f"fireflyer.dev/node-class={started.node_class}"
        ):
            await api.delete(NODES, node["metadata"]["name"])


async def test_a_cross_zone_job_runs_to_its_end(scene, until):
    for name, zone in (("a0", "A"), ("a1", "A"), ("b0", "B"), ("b1", "B")):
        await scene.add_node(f"{scene.node_class}-{name}", zone)
    await scene.submit("low", 4, priority="low")
    await until(lambda: scene.status("low").phase is Phase.RUNNING)
    assert len(scene.status("low").assignment.cross_zone_pair) == 2
    topology = await scene.api.get(FLYERTOPOLOGIES, "cluster")
    assert topology["status"]["holder"]["job"] == "low"
    await scene.edit("low", suspend=True)
    await until(lambda: scene.status("low").phase is Phase.SUSPENDED)
    await scene.edit("low", suspend=False)
    await until(lambda: scene.status("low").phase is Phase.RUNNING)
    await scene.submit("high", 3, priority="high")
    await until(lambda: scene.status("high").phase is Phase.RUNNING)
    assert scene.status("low").eviction.reason == "Preempted"
    scene.finish("high")
    await until(lambda: scene.status("high").phase is Phase.SUCCEEDED)
    await until(lambda: scene.status("low").phase is Phase.RUNNING)
    scene.finish("low")
    await until(lambda: scene.status("low").phase is Phase.SUCCEEDED)
    status = scene.status("low")
    assert (status.history.attempt, status.history.restarts, status.checkpoint.step) == (3, 0, 2)
    await until(lambda: not scene.status("low").occupied)


async def test_the_gate_of_pods_on_shared_nodes_is_opened(scene, until):
    await scene.add_node(f"{scene.node_class}-s0", "A", dedicated=False)
    await scene.add_node(f"{scene.node_class}-s1", "A", dedicated=False)
    await scene.submit("shared", 2)
    await until(lambda: scene.status("shared").phase is Phase.RUNNING)
    scene.finish("shared")
    await until(lambda: scene.status("shared").phase is Phase.SUCCEEDED)


async def test_every_status_may_be_committed_by_a_patch(scene, until, monkeypatch):
    """Every replacement conflicts, and the status has characters that Go writes differently."""
    replace_object = Api.replace

    async def outdated(api: Api, resource: Any, value: dict[str, Any], *more: str) -> Any:
        if resource is FLYERJOBS:
            value = {**value, "metadata": {**value["metadata"], "resourceVersion": "1"}}
        return await replace_object(api, resource, value, *more)

    monkeypatch.setattr(Api, "replace", outdated)
    await scene.add_node(f"{scene.node_class}-a0", "A")
    await scene.submit("job", 1)
    await until(lambda: scene.status("job").phase is Phase.RUNNING)
    assert scene.gateway is not None
    gang = scene.gateway.gangs[f"{scene.namespace}/job"]
    saved = CheckpointReported(
        gang.start.job, 1, 7, "/run/<step> & × \u2028", uid=gang.job.metadata.uid or ""
    )
    scene.gateway.report(saved)
    await until(lambda: scene.status("job").checkpoint is not None)
    scene.finish("job")
    await until(lambda: scene.status("job").phase is Phase.SUCCEEDED)
    assert scene.status("job").checkpoint.path == "/run/<step> & × \u2028"
