"""`flyer why` shows the leader's decision to a user who may read only one job."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from flyer import engine
from flyer.api import Phase
from flyer.cli.screens import why_screen
from flyer.client.kubernetes.asynchronous import AsyncKubeClient
from flyer.kube.apiserver import Access, Api
from flyer.kube.apiserver.errors import ForbiddenError
from flyer.kube.apiserver.resources import FLYERJOBS
from flyer.kube.services.jobs.published_status import Redactor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

OURS = "team-a"


class Tenant(Api):
    """The rights of a user who may read the FlyerJobs of one namespace."""

    async def get(self, resource: Any, name: str, namespace: str = "", **more: Any) -> Any:
        if resource is not FLYERJOBS or namespace != OURS:
            raise ForbiddenError(f"get {resource.plural} {name}", "forbidden", code=403)
        return await super().get(resource, name, namespace, **more)

    async def list(self, resource: Any, *_: Any, **__: Any) -> Any:
        raise ForbiddenError(f"list {resource.plural}", "forbidden", code=403)


@pytest.fixture
async def tenant(cluster: Any) -> AsyncIterator[AsyncKubeClient]:
    api = Tenant(Access(cluster.server.url), agent="tenant")
    async with AsyncKubeClient(api, namespace=OURS) as client:
        yield client


def prepare(cluster: Any) -> None:
    """Two zones of which the topology names one, and a namespace whose team has a quota."""
    for name in ("prod", OURS):
        cluster.store.create("namespaces", {"metadata": {"name": name}})
    cluster.nodes("AAABBB")
    zones = {"spec": {"zones": [{"name": "A"}]}}
    cluster.store.create("flyertopologies", {"metadata": {"name": "cluster"}, **zones})
    quota = {"spec": {"subject": {"kind": "Namespace", "name": OURS}, "nodes": 2}}
    cluster.store.create("flyerquotas", {"metadata": {"name": "ours"}, **quota})


async def test_a_tenant_reads_the_leaders_decision(
    cluster: Any, tenant: AsyncKubeClient, until: Callable[..., Any]
) -> None:
    prepare(cluster)
    operator = cluster.operator()
    cluster.submit("secret", 2, namespace="prod", priority="high")
    await until(lambda: cluster.status("secret", "prod").phase is Phase.RUNNING)
    cluster.submit("runs", namespace=OURS)
    await until(lambda: cluster.status("runs", OURS).phase is Phase.RUNNING)
    cluster.submit("elsewhere", 3, namespace="prod", managedBy="kueue.x-k8s.io/multikueue")
    cluster.submit(
        "zone", namespace=OURS, nodeClass="default", zone="B"
    )  # the topology excludes it
    cluster.submit("large", 5, namespace=OURS)
    cluster.submit("quota", 2, namespace=OURS)
    cluster.submit("turn", 1, namespace=OURS)
    names = ("runs", "zone", "large", "quota", "turn")

    def decided() -> bool:
        waiting = [cluster.status(name, OURS).pending for name in names[1:]]
        return all(item is not None and item.time is not None for item in waiting)

    await until(decided)
    state = operator.leader.term.state
    redactor = Redactor(
        lambda key: cluster.store.find("flyerjobs", *key.split("/")[::-1]) is not None
    )
    for name in names:
        key, reported = f"{OURS}/{name}", await tenant.why(name)
        expected = engine.explain(state, key, time.time())
        assert (reported.verdict, reported.position) == (expected.verdict, expected.position), name
        assert reported.summary == redactor.redact(expected.summary, key)
        messages = [redactor.redact(blocker.message, key) for blocker in expected.blockers]
        assert [reason.message for reason in reported.reasons] == messages
        commands = [f"{remedy.command}  # {remedy.effect}" for remedy in expected.remedies]
        assert reported.unblock == [
            command for command in commands if redactor.redact(command, key) == command
        ]
        assert "secret" not in json.dumps(cluster.store.get("flyerjobs", name, OURS))
    explanations = {name: await tenant.why(name) for name in names}
    assert explanations["zone"].verdict == explanations["large"].verdict == "never"
    assert explanations["quota"].reasons[0].reason == "WaitingForQuota"
    assert explanations["quota"].unblock == [
        f"flyer suspend {OURS}/runs  # gives its nodes' quota back to {OURS}"
    ]
    assert re.search(r"decided \d+.* ago", why_screen(explanations["quota"]))


async def test_a_node_out_of_service_is_listed_with_the_command_that_returns_it(
    cluster: Any, tenant: AsyncKubeClient, until: Callable[..., Any]
) -> None:
    cluster.store.create("namespaces", {"metadata": {"name": OURS}})
    cluster.nodes("AAA")
    drain = {"metadata": {"name": "a0"}, "spec": {"drain": {"reason": "disk", "by": "anna"}}}
    cluster.store.create("nodehealths", drain)
    cluster.store.patch("nodes", "a1", {"spec": {"unschedulable": True}})
    cluster.operator()
    cluster.submit("waits", 3, namespace=OURS)
    await until(lambda: cluster.status("waits", OURS).pending)
    await until(lambda: cluster.status("waits", OURS).pending.unblock)
    reported = await tenant.why("waits")
    assert "node a0 is out: drained by anna: disk" in [
        reason.message for reason in reported.reasons
    ]
    release = """kubectl patch nodehealth a0 --type=merge -p '{"spec":{"drain":null}}'"""
    assert f"{release}  # makes a0 schedulable again: drained by anna: disk" in reported.unblock
    assert "kubectl uncordon a1  # makes a1 schedulable again" in reported.unblock
