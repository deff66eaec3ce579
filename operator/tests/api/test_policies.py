"""The admission policies, asked of a real API server: who may do what."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import names
from flyer.kube.client.errors import ApiError, ForbiddenError, InvalidError

from .real_api import AGENT, CRDS, OPERATOR, RESOURCES, acting, broken, gone, named, stored
from .rule_cases import CASES, RUNNING, job, status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator

    from flyer.kube.client import Api

    from e2e.cluster.handle import Cluster


@pytest.fixture
def policies(kinds: Cluster) -> Iterator[Cluster]:
    path = str(CRDS / "policies")
    kinds.kubectl("apply", "--server-side", "-f", path)
    yield kinds
    kinds.kubectl("delete", "-f", path, "--wait=true", "--ignore-not-found")


async def in_force(api: Api) -> None:
    """Wait until the policies are: the API server takes a moment to read them, one by one."""
    jobs = RESOURCES["flyerjobs"]
    for _ in range(600):
        name = f"probe-{secrets.token_hex(4)}"
        await stored(api, "flyerjobs", name, job())
        try:
            found = await api.merge(jobs, name, {"spec": {"stop": "graceful"}}, "default")
            stamped = names.USER_ANNOTATION in found["metadata"].get("annotations", {})
            status_patch, taken_back = {"status": {"phase": "Queued"}}, {"spec": {"stop": None}}
            if (
                stamped
                and await refused(api.merge(jobs, name, status_patch, "default", "status"))
                and await refused(api.merge(jobs, name, taken_back, "default"))
            ):
                return
        finally:
            await gone(api, "flyerjobs", name)
        await asyncio.sleep(0.1)
    raise AssertionError("the policies never came into force")


async def refused(call: Awaitable[object]) -> bool:
    """Whether a policy stands in its way."""
    try:
        await call
    except ApiError:
        return True
    return False


async def test_policies(policies: Cluster, api: Api) -> None:
    """All of them in one: they take seconds to come into force."""
    await in_force(api)
    jobs, healths = RESOURCES["flyerjobs"], RESOURCES["nodehealths"]
    name = f"policy-{secrets.token_hex(4)}"
    anna = await acting(policies, "anna")
    operator = await acting(policies, OPERATOR)
    async with anna, operator:
        # Who created it is stamped, whatever was claimed.
        claimed = named("flyerjobs", name, job())
        claimed["metadata"]["annotations"] = {names.USER_ANNOTATION: "root"}
        made = await anna.create(jobs, claimed, "default")
        assert made["metadata"]["annotations"][names.USER_ANNOTATION] == "anna"
        # Nobody asked for anything yet, so nobody else did.
        claimed["metadata"]["annotations"] = {names.CHANGED_BY_ANNOTATION: "root"}
        with pytest.raises(InvalidError, match="root is not you, anna: leave it out"):
            await anna.create(jobs, claimed, "default")
        # And is not changed.
        patch = {"metadata": {"annotations": {names.USER_ANNOTATION: "ben"}}}
        with pytest.raises(InvalidError, match="ben cannot replace anna: it says who created"):
            await anna.merge(jobs, name, patch, "default")
        # What is asked for is stamped with who asked.
        ben = await acting(policies, "ben")
        async with ben:
            asked = await ben.merge(jobs, name, {"spec": {"suspend": True}}, "default")
        assert asked["metadata"]["annotations"][names.CHANGED_BY_ANNOTATION] == "ben"
        patch = {"metadata": {"annotations": {names.CHANGED_BY_ANNOTATION: "root"}}}
        with pytest.raises(InvalidError, match="root is not you, anna: leave it out"):
            await anna.merge(jobs, name, patch, "default")
        # Only the operator writes the status.
        patch = {"status": RUNNING["status"]}
        with pytest.raises(ForbiddenError, match=f"anna may not write it: only {OPERATOR} does"):
            await anna.merge(jobs, name, patch, "default", "status")
        await gone(api, "flyertopologies", "cluster")
        await _taken(operator, name, patch)
        await _fixed(anna, operator)
        await _epochs(api, operator, name)
        await gone(anna, "flyerjobs", name)

    await _priorities(policies, api)
    await _healths(policies, healths, api)
    await _unstamped(policies)


async def _fixed(anna: Api, operator: Api) -> None:
    """What a job runs on is not changed under it; while it waits it may be."""
    for case in (case for case in CASES if case.policy):
        name = f"fixed-{secrets.token_hex(4)}"
        with pytest.raises(InvalidError) as refusal:
            await broken(anna, operator, case, name)
        assert case.says in str(refusal.value)
        await gone(anna, "flyerjobs", name)
    name = f"fixed-{secrets.token_hex(4)}"
    await stored(anna, "flyerjobs", name, job(status=status("Suspended")), operator)
    patch = {"spec": {"nodes": 3, "group": "a100", "stop": "graceful"}}
    await anna.merge(RESOURCES["flyerjobs"], name, patch, "default")
    await anna.merge(RESOURCES["flyerjobs"], name, {"spec": {"stop": "now"}}, "default")
    await gone(anna, "flyerjobs", name)


async def _unstamped(policies: Cluster) -> None:
    """As before Kubernetes 1.36: who creates a job is not stamped, and claims no other's name."""
    stamps = "mutatingadmissionpolicybinding/flyerjob-user.fireflyer.dev"
    await asyncio.to_thread(policies.kubectl, "delete", stamps)
    jobs = RESOURCES["flyerjobs"]
    async with await acting(policies, "anna") as anna:

        async def created(**claims: str) -> dict[str, Any]:
            name = f"claim-{secrets.token_hex(4)}"
            value = named("flyerjobs", name, job())
            value["metadata"]["annotations"] = claims
            try:
                made = await anna.create(jobs, value, "default")
            finally:
                await gone(anna, "flyerjobs", name)
            found: dict[str, Any] = made["metadata"].get("annotations") or {}
            return found

        for _ in range(600):
            if names.USER_ANNOTATION not in await created():
                break
            await asyncio.sleep(0.1)
        with pytest.raises(InvalidError, match="ben is not you, anna: leave it out"):
            await created(**{names.USER_ANNOTATION: "ben"})
        with pytest.raises(InvalidError, match="ben is not you, anna: leave it out"):
            await created(**{names.CHANGED_BY_ANNOTATION: "ben"})
        own = {names.USER_ANNOTATION: "anna"}
        assert await created(**own) == own


async def _taken(operator: Api, name: str, patch: dict[str, Any]) -> None:
    """Write a job's status; the API server may take a moment to see that no epoch forbids it."""
    for _ in range(600):
        with contextlib.suppress(InvalidError):
            await operator.merge(RESOURCES["flyerjobs"], name, patch, "default", "status")
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{patch} was never taken")


async def _epochs(api: Api, operator: Api, name: str) -> None:
    """Who leads says so in the topology; whoever led before writes no status any more."""
    jobs, topologies = RESOURCES["flyerjobs"], RESOURCES["flyertopologies"]
    patch = {"status": {"message": "by epoch 3"}}
    await api.create(topologies, named("flyertopologies", "cluster", {"spec": {}}))
    await operator.merge(jobs, name, patch, "default", "status")  # nobody's epoch yet
    await operator.merge(topologies, "cluster", {"status": {"epoch": 4}}, "", "status")
    words = "status.epoch: 3 is lower than 4, which FlyerTopology cluster says: a newer leader"
    for count in range(600):  # the topology is read from a watch
        patch = {"status": {"message": f"by epoch 3, {count}"}}
        try:
            await operator.merge(jobs, name, patch, "default", "status")
        except InvalidError as refusal:
            assert words in str(refusal)  # noqa: PT017
            break
        await asyncio.sleep(0.1)
    else:
        raise AssertionError("a leader that was replaced still writes")
    for epoch in (4, 5):
        await operator.merge(jobs, name, {"status": {"epoch": epoch}}, "default", "status")
    await gone(api, "flyertopologies", "cluster")


async def _priorities(policies: Cluster, api: Api) -> None:
    """Levels above normal are for those who may use them."""
    jobs = RESOURCES["flyerjobs"]
    rules = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": "test-users"},
        "rules": [
            {"apiGroups": [names.GROUP], "resources": ["flyerjobs"], "verbs": ["*"]},
            {
                "apiGroups": [names.GROUP], "resources": ["flyerpriorities"],
                "resourceNames": ["high"], "verbs": ["use"],
            },
        ],
    }  # fmt: skip
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": "test-users"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "test-users",
        },
        "subjects": [{"kind": "Group", "name": "team", "apiGroup": "rbac.authorization.k8s.io"}],
    }  # fmt: skip
    policies.apply(rules, binding)
    name = f"policy-{secrets.token_hex(4)}"
    clara = await acting(policies, "clara", "team")
    async with clara:
        for _ in range(300):  # RBAC is read from a cache, too
            try:
                await clara.create(jobs, named("flyerjobs", name, job(priority="high")), "default")
            except ForbiddenError:
                await asyncio.sleep(0.1)
            else:
                break
        with pytest.raises(
            ForbiddenError, match="priority: extreme-high is not yours to use, clara: choose"
        ):
            await clara.merge(jobs, name, {"spec": {"priority": "extreme-high"}}, "default")
        await clara.merge(jobs, name, {"spec": {"priority": "low"}}, "default")
    await gone(api, "flyerjobs", name)
    policies.kubectl("delete", "clusterrole,clusterrolebinding", "test-users")


async def _healths(policies: Cluster, healths: Any, api: Api) -> None:
    """An agent writes of its own node."""
    own, other = await acting(policies, AGENT, node="a1"), await acting(policies, AGENT, node="b7")
    unbound = await acting(policies, AGENT)
    async with own, other, unbound:
        await own.create(healths, named("nodehealths", "a1", {"spec": {}}))
        patch = {"status": {"state": "Healthy"}}
        await own.merge(healths, "a1", patch, "", "status")
        lie = {"status": {"state": "Unknown", "reason": "DriverHangs"}}
        for somebody, words in (
            (other, "on node b7 may not write it: only the agent on that node does"),
            (unbound, "may not write it: only the agent on that node does"),
            (api, "may not write it: only the agent on that node does"),
        ):
            with pytest.raises(ForbiddenError, match=words):
                await somebody.merge(healths, "a1", lie, "", "status")
        with pytest.raises(ForbiddenError, match="an agent writes the object of its own node"):
            await other.create(healths, named("nodehealths", "a2", {"spec": {}}))
        # People drain it.
        drain = {"spec": {"drain": {"reason": "disk", "by": "anna"}}}
        assert (await api.merge(healths, "a1", drain))["spec"]["drain"]["by"] == "anna"
    await gone(api, "nodehealths", "a1")
