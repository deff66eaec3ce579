"""The page about tenants: its rights are the chart's, and its answers those of an API server.

The API server is the one in memory, which answers as a real one does (`test_memory_server`).
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import names
from flyer.api.policies import admission_policies
from flyer.kube.apiserver import Access, Api, Limits
from flyer.kube.apiserver import resources as known
from flyer.kube.apiserver.errors import ApiError

from charts.tests.conftest import CHART, Render, Rendered
from fakekube import ApiServer
from fakekube.apiserver.admission import OPERATOR, acting
from fakekube.apiserver.impersonation import Impersonation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PAGE = CHART.parents[1] / "docs" / "concepts" / "tenants.md"
NAMESPACE = "default"
TEMPLATE = {"spec": {"containers": [{"name": "trainer", "command": ["true"]}]}}
NODES = [{"name": "a1", "zone": "A", "firstRank": 0}, {"name": "a2", "zone": "A", "firstRank": 1}]
RUNNING = {
    "phase": "Running", "epoch": 3, "history": {"id": "c", "attempt": 1},
    "assignment": {"epoch": 3, "nodes": NODES, "reservedAt": "2026-11-20T14:05:00.000Z"},
}  # fmt: skip


def table(name: str) -> list[list[str]]:
    """The cells of every row of a table of the page."""
    text = PAGE.read_text().split(f"<!-- {name} -->")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[3:]]


def test_the_rights_of_the_page_are_those_that_the_chart_adds(everything: Rendered) -> None:
    added: dict[str, dict[str, str]] = {}
    for role in everything.of("ClusterRole"):
        for label in role["metadata"]["labels"]:
            if to := re.fullmatch(r"rbac\.authorization\.k8s\.io/aggregate-to-(\w+)", label):
                for rule in role["rules"]:
                    assert rule["apiGroups"] == [names.GROUP]
                    for resource in rule["resources"]:
                        rights = added.setdefault(resource, {})
                        assert to[1] not in rights
                        rights[to[1]] = ", ".join(rule["verbs"])
    page = {
        resource.strip("`"): {
            role: verbs
            for role, verbs in (("view", view), ("edit", edit), ("admin", edit))
            if verbs != "–"
        }
        for resource, view, edit in table("rights")
    }
    assert page == added


def test_roles_of_the_page_exist_and_are_bound_to_no_tenant(render: Render) -> None:
    rendered = render()
    roles = {item["metadata"]["name"]: item for item in rendered.of("ClusterRole")}
    page = PAGE.read_text()
    named = set(
        re.findall(r"`(flyer-(?:priorities|queues|dedicated-nodes|priority-classes))`", page)
    )
    assert len(named) == 4
    for name in named:
        labels = roles[name]["metadata"]["labels"]
        assert not [label for label in labels if "aggregate-to" in label], name
    bindings = {
        (binding["roleRef"]["name"], subject["name"])
        for binding in rendered.of("ClusterRoleBinding", "RoleBinding")
        for subject in binding["subjects"]
        if subject["kind"] == "Group" and not subject["name"].startswith("system:serviceaccounts:")
    }
    assert bindings == {("flyer-leader-view", "system:authenticated")}


class Tenant:
    """A user with rights in one namespace, the objects there, and who else writes them."""

    def __init__(self, server: ApiServer, anna: Api, operator: Api) -> None:
        self.server, self.anna, self.operator = server, anna, operator

    async def create_job(self, name: str = "gpt", **spec: Any) -> dict[str, Any]:
        return await self.anna.create(known.FLYERJOBS, job(name, **spec), NAMESPACE)

    async def change_job(self, patch: dict[str, Any], subresource: str = "") -> dict[str, Any]:
        return await self.anna.merge(known.FLYERJOBS, "gpt", patch, NAMESPACE, subresource)

    async def create_pod(self, labels: dict[str, str] | None = None, **spec: Any) -> None:
        await self.anna.create(known.PODS, pod("own", labels, **spec), NAMESPACE)

    async def running_job(self) -> None:
        """A job with a pod that the operator made and that runs."""
        created = await self.create_job()
        await self.operator.merge(known.FLYERJOBS, "gpt", {"status": RUNNING}, NAMESPACE, "status")
        body = pod("gpt-0", {"fireflyer.dev/job": "gpt"}, nodeName="a1")
        owner = {
            "apiVersion": names.API_VERSION, "kind": names.KIND_JOB, "name": "gpt",
            "uid": created["metadata"]["uid"], "controller": True,
        }  # fmt: skip
        body["metadata"]["ownerReferences"] = [owner]
        await self.operator.create(known.PODS, body, NAMESPACE)


def job(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND_JOB,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"nodes": 2, "template": TEMPLATE, **spec},
    }


def pod(name: str, labels: dict[str, str] | None, **spec: Any) -> dict[str, Any]:
    body = {"containers": [{"name": "a", "image": "i"}], "automountServiceAccountToken": False}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**body, **spec}}


async def _whole_life(tenant: Tenant) -> None:
    await tenant.create_job()
    for change in ({"maxRestarts": 3}, {"suspend": True}, {"suspend": False}, {"stop": "Graceful"}):
        await tenant.change_job({"spec": change})
    await tenant.anna.delete(known.FLYERJOBS, "gpt", NAMESPACE)


async def _queue(tenant: Tenant) -> None:
    quota = {"metadata": {"name": "nightly"}, "spec": {"queue": "nightly", "nodes": 4}}
    tenant.server.store.create("flyerquotas", quota)
    await tenant.create_job(queue="nightly")


async def _grace(tenant: Tenant) -> None:
    limits = {"maxCheckpointGracePeriod": "10m"}
    topology = {"metadata": {"name": "cluster"}, "spec": {"limits": limits}}
    tenant.server.store.create("flyertopologies", topology)
    await tenant.create_job(
        preemption={"checkpointGracePeriod": "1m", "maxCheckpointGracePeriod": "1h"}
    )


async def _size(tenant: Tenant) -> None:
    body = job("gpt")
    copies = {"kubectl.kubernetes.io/last-applied-configuration": "x" * ((64 << 10) + 1)}
    body["metadata"]["annotations"] = copies
    await tenant.anna.create(known.FLYERJOBS, body, NAMESPACE)


async def _references(tenant: Tenant) -> None:
    body = job("gpt")
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y" * (8 << 10)}
    body["metadata"]["ownerReferences"] = [reference]
    await tenant.anna.create(known.FLYERJOBS, body, NAMESPACE)


async def _template(tenant: Tenant) -> None:
    marked = {**TEMPLATE, "metadata": {"labels": {"fireflyer.dev/job": "other"}}}
    await tenant.create_job(template=marked)


async def _in_the_name_of(tenant: Tenant) -> None:
    body = job("gpt")
    body["metadata"]["annotations"] = {names.USER_ANNOTATION: "ben"}
    created = await tenant.anna.create(known.FLYERJOBS, body, NAMESPACE)
    assert created["metadata"]["annotations"][names.USER_ANNOTATION] == "anna"


async def _given_away(tenant: Tenant) -> None:
    await tenant.create_job()
    await tenant.change_job({"metadata": {"annotations": {names.USER_ANNOTATION: "ben"}}})


async def _status(tenant: Tenant) -> None:
    await tenant.create_job()
    await tenant.change_job({"status": RUNNING}, "status")


async def _ranks(tenant: Tenant) -> None:
    await tenant.running_job()
    await tenant.change_job({"spec": {"ranksPerNode": 4}})


async def _own_pod(tenant: Tenant) -> None:
    await tenant.create_pod({"app": "mine"})
    await tenant.anna.merge(known.PODS, "own", {"metadata": {"labels": {"app": "x"}}}, NAMESPACE)


async def _delete(tenant: Tenant, grace_seconds: int) -> None:
    await tenant.running_job()
    await tenant.anna.delete(known.PODS, "gpt-0", NAMESPACE, grace_seconds=grace_seconds)


async def _evict(tenant: Tenant) -> None:
    await tenant.running_job()
    eviction = {
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": "gpt-0", "namespace": NAMESPACE},
        "deleteOptions": {"gracePeriodSeconds": 0},
    }  # fmt: skip
    await tenant.anna.post(known.PODS, "gpt-0", NAMESPACE, "eviction", eviction)


async def _take_away(tenant: Tenant) -> None:
    await tenant.running_job()
    free = {"metadata": {"ownerReferences": None}}
    await tenant.anna.merge(known.PODS, "gpt-0", free, NAMESPACE)


TOLERATION = {"key": "fireflyer.dev/dedicated", "operator": "Exists", "effect": "NoSchedule"}

ATTEMPTS: dict[str, Callable[[Tenant], Awaitable[Any]]] = {
    "create a job, change it, suspend it, stop it and delete it": _whole_life,
    "create a job at the priority `high`": lambda t: t.create_job(priority="high"),
    "create a job in a queue that a FlyerQuota names": _queue,
    "ask for more grace than the administrator's cap": _grace,
    "create a job of more than 64 KiB of kubectl's copies": _size,
    "create a job of more than 8 KiB of finalizers and owner references": _references,
    "put a label of fireflyer.dev into a job's template": _template,
    "create a job in another user's name": _in_the_name_of,
    "give its job to another user later": _given_away,
    "write a job's status": _status,
    "change the number of ranks of a running job": _ranks,
    "create a pod, and change its own labels": _own_pod,
    "create a pod that looks like a job's": lambda t: t.create_pod({"fireflyer.dev/job": "gpt"}),
    "create a pod that tolerates the taint of dedicated nodes": (
        lambda t: t.create_pod(tolerations=[TOLERATION])
    ),
    "create a pod that names its node": lambda t: t.create_pod(nodeName="a1"),
    "create a pod with the class of our services": (
        lambda t: t.create_pod(priorityClassName="flyer-control")
    ),
    "delete a pod of its job with a grace period": lambda t: _delete(t, 30),
    "delete a pod of its job by force while it runs": lambda t: _delete(t, 0),
    "evict a pod of its job by force while it runs": _evict,
    "take a running pod away from its job": _take_away,
}


@asynccontextmanager
async def _tenant() -> AsyncIterator[Tenant]:
    async with ApiServer() as server:

        def by(user: str) -> Api:
            # An answer that is late on a busy machine is not asked for twice.
            access = Impersonation(Access(server.url), acting(user, "people"))
            patient = Limits(answer_seconds=60.0, call_seconds=60.0)
            return Api(access, agent="tests", limits=patient)

        account = {"metadata": {"name": "default"}}
        server.store.create("serviceaccounts", account, NAMESPACE)
        control = {"metadata": {"name": "flyer-control"}, "value": 900_000_000}
        server.store.create("priorityclasses", control)
        async with by("anna") as anna, by(OPERATOR) as operator:
            yield Tenant(server, anna, operator)


def test_every_attempt_of_the_page_has_a_test() -> None:
    assert [attempt for attempt, _ in table("attempts")] == list(ATTEMPTS)


@pytest.mark.parametrize(("attempt", "answer"), table("attempts"))
async def test_the_result_of_an_attempt_matches_the_page(attempt: str, answer: str) -> None:
    async with _tenant() as tenant:
        if answer.startswith("allowed"):
            await ATTEMPTS[attempt](tenant)
            return
        with pytest.raises(ApiError) as refused:
            await ATTEMPTS[attempt](tenant)
    policy = answer.removeprefix("refused: ").strip("`")
    assert f"ValidatingAdmissionPolicy '{policy}.{names.GROUP}'" in str(refused.value)


def test_every_policy_about_tenants_is_on_the_page() -> None:
    policies = {
        policy["metadata"]["name"].partition(".")[0]
        for policy in admission_policies()
        if policy["kind"] == "ValidatingAdmissionPolicy"
    }
    named = {answer.partition(": ")[2].strip("`") for _, answer in table("attempts")} - {""}
    # Those are about the operator's own account and about node agents.
    exempt = {policy for policy in policies if policy.startswith(("operator-", "nodehealth-"))}
    assert policies - exempt - named <= {
        "flyerjob-epoch",
        "flyerquota-status",
        "flyertopology-status",
    }
