"""Admission policies on a real API server: which user may do what."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import names
from flyer.api.policies import admission_policies
from flyer.kube.apiserver.errors import ApiError, ForbiddenError, InvalidError

from .pod_cases import pods_and_sizes
from .policy_refusals import REFUSALS, RefusalChecker, pattern
from .real_api import (
    AGENT,
    CRDS,
    OPERATOR,
    RESOURCES,
    client_as,
    create_object,
    delete_object,
    object_of,
    send_invalid_edit,
)
from .rule_cases import CASES, RUNNING, job, status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from flyer.kube.apiserver import Api

    from testcluster.handle import Cluster


def test_every_validation_has_a_case() -> None:
    """`test_policies` checks that a server returns the message of each case."""
    for policy in admission_policies():
        name = policy["metadata"]["name"].partition(".")[0]
        for validation in policy["spec"].get("validations", []):
            texts = [case.text for case in REFUSALS.values() if case.policy == name]
            expression = pattern(validation["messageExpression"])
            assert any(re.fullmatch(expression, text) for text in texts), (name, expression)


def test_every_case_belongs_to_a_policy_and_its_message_has_a_remedy() -> None:
    policies = {admission_policy["metadata"]["name"] for admission_policy in admission_policies()}
    for case in REFUSALS.values():
        assert f"{case.policy}.{names.GROUP}" in policies
        assert re.search(r"(: [a-z]|, [a-z]|; [a-z])", case.text), case


@pytest.fixture
async def policies(kinds: Cluster, api: Api) -> AsyncIterator[Cluster]:
    path = str(CRDS / "policies")
    kinds.kubectl("apply", "--server-side", "-f", path)
    yield kinds
    kinds.kubectl("delete", "-f", path, "--wait=true", "--ignore-not-found")
    await wait_until_removed(api)


async def wait_until_removed(api: Api) -> None:
    """Wait until the API server no longer applies the policies, after they were deleted."""
    jobs = RESOURCES["flyerjobs"]
    for _ in range(600):
        name = f"probe-{secrets.token_hex(4)}"
        await create_object(api, "flyerjobs", name, job())
        try:
            status_patch = {"status": {"phase": "Queued"}}
            if not await refused(api.merge(jobs, name, status_patch, "default", "status")):
                return
        finally:
            await delete_object(api, "flyerjobs", name)
        await asyncio.sleep(0.1)
    raise AssertionError("the API server still applies the policies")


async def wait_until_active(api: Api) -> None:
    """Wait until the API server applies the policies; it reads them one by one."""
    jobs = RESOURCES["flyerjobs"]
    for _ in range(600):
        name = f"probe-{secrets.token_hex(4)}"
        await create_object(api, "flyerjobs", name, job())
        try:
            job_object = await api.merge(jobs, name, {"spec": {"stop": "Graceful"}}, "default")
            stamped = names.USER_ANNOTATION in job_object["metadata"].get("annotations", {})
            status_patch, withdrawn = {"status": {"phase": "Queued"}}, {"spec": {"stop": None}}
            if (
                stamped
                and await refused(api.merge(jobs, name, status_patch, "default", "status"))
                and await refused(api.merge(jobs, name, withdrawn, "default"))
            ):
                return
        finally:
            await delete_object(api, "flyerjobs", name)
        await asyncio.sleep(0.1)
    raise AssertionError("the API server does not apply the policies")


async def refused(call: Awaitable[object]) -> bool:
    """Whether the API server refuses the call."""
    try:
        await call
    except ApiError:
        return True
    return False


async def test_policies(policies: Cluster, api: Api) -> None:
    """All policies in one test: the API server takes seconds to apply them."""
    await every_policy(policies, api)


async def every_policy(policies: Cluster, api: Api) -> None:
    await wait_until_active(api)
    checker = RefusalChecker()
    name = f"policy-{secrets.token_hex(4)}"
    operator = await client_as(policies, OPERATOR)
    async with await client_as(policies, "anna") as anna, operator:
        await _people(policies, checker, anna, name)
        await _statuses(checker, anna, operator, api, name)
        await _check_other_controllers(anna)
        await _fixed(checker, anna, operator)
        await _epochs(checker, api, operator, name)
        await delete_object(anna, "flyerjobs", name)

    await _priorities(policies, checker, api)
    await _queues(policies, checker, api)
    await _healths(policies, checker, api)
    await pods_and_sizes(policies, checker, api)
    await _unstamped(policies, checker)
    assert checker.checked == set(REFUSALS)


async def _people(policies: Cluster, checker: RefusalChecker, anna: Api, name: str) -> None:
    """The creator of a job and the user of each change are stamped, and users cannot forge them."""
    jobs = RESOURCES["flyerjobs"]
    claimed = object_of("flyerjobs", name, job())
    claimed["metadata"]["annotations"] = {names.USER_ANNOTATION: "root"}
    created_job = await anna.create(jobs, claimed, "default")
    assert created_job["metadata"]["annotations"][names.USER_ANNOTATION] == "anna"
    # No change was requested yet, so a claim that another user did is refused.
    claimed["metadata"]["annotations"] = {names.CHANGED_BY_ANNOTATION: "ben"}
    await checker.refuses(anna.create(jobs, claimed, "default"), "asked by another")
    patch = {"metadata": {"annotations": {names.USER_ANNOTATION: "ben"}}}
    await checker.refuses(anna.merge(jobs, name, patch, "default"), "taken over")
    # Changes of these fields are stamped with their user; other changes are not.
    again = {"metadata": {"annotations": {names.REQUEUE_ANNOTATION: "1"}}}
    async with await client_as(policies, "ben") as ben, await client_as(policies, "cleo") as cleo:
        for spec in (
            {"spec": {"suspend": True}},
            {"spec": {"priority": "low"}},
            again,
            {"spec": {"stop": "Graceful"}},
        ):
            changed = await ben.merge(jobs, name, spec, "default")
            assert changed["metadata"]["annotations"][names.CHANGED_BY_ANNOTATION] == "ben", spec
            # Repeated values and changes of other fields are not stamped.
            for idle in (spec, {"spec": {"maxRestarts": 3}}, {"spec": {"maxRestarts": 4}}):
                changed = await cleo.merge(jobs, name, idle, "default")
                stamped = changed["metadata"]["annotations"][names.CHANGED_BY_ANNOTATION]
                assert stamped == "ben", idle
            cleared = {"metadata": {"annotations": {names.CHANGED_BY_ANNOTATION: "anna"}}}
            await anna.merge(jobs, name, cleared, "default")
    patch = {"metadata": {"annotations": {names.CHANGED_BY_ANNOTATION: "ben"}}}
    await checker.refuses(anna.merge(jobs, name, patch, "default"), "asked by another")


async def _statuses(checker: RefusalChecker, anna: Api, operator: Api, api: Api, name: str) -> None:
    """Only the operator writes a status."""
    jobs = RESOURCES["flyerjobs"]
    patch = {"status": RUNNING["status"]}
    await checker.refuses(anna.merge(jobs, name, patch, "default", "status"), "a job's status")
    await delete_object(api, "flyertopologies", "cluster")
    await _check_accepted(operator, name, patch)
    for plural, thing, key, change in (
        ("flyerquotas", name, "a quota's status", {"status": {"usedNodes": 1}}),
        ("flyertopologies", "cluster", "the topology's status", {"status": {"epoch": 1}}),
    ):
        body = {"spec": {"nodes": 4} if plural == "flyerquotas" else {}}
        await anna.create(RESOURCES[plural], object_of(plural, thing, body))
        write = anna.merge(RESOURCES[plural], thing, change, "", "status")
        await checker.refuses(write, key)
        await operator.merge(RESOURCES[plural], thing, change, "", "status")
        await delete_object(anna, plural, thing)


async def _check_other_controllers(anna: Api) -> None:
    """RBAC alone decides who writes the status of another controller's job."""
    name = f"others-{secrets.token_hex(4)}"
    await create_object(anna, "flyerjobs", name, job(managedBy="kueue.x-k8s.io/multikueue"))
    patch = {"status": {"phase": "Queued", "message": "elsewhere"}}
    await anna.merge(RESOURCES["flyerjobs"], name, patch, "default", "status")
    await delete_object(anna, "flyerjobs", name)


async def _fixed(checker: RefusalChecker, anna: Api, operator: Api) -> None:
    """Fields of a running job are fixed; those of a queued job may change."""
    for case in (case for case in CASES if case.policy):
        name = f"fixed-{secrets.token_hex(4)}"
        await checker.refuses(send_invalid_edit(anna, operator, case, name), case.name)
        await delete_object(anna, "flyerjobs", name)
    name = f"fixed-{secrets.token_hex(4)}"
    await create_object(anna, "flyerjobs", name, job(status=status("Suspended")), operator)
    patch = {"spec": {"nodes": 3, "nodeClass": "a100", "stop": "Graceful"}}
    await anna.merge(RESOURCES["flyerjobs"], name, patch, "default")
    await anna.merge(RESOURCES["flyerjobs"], name, {"spec": {"stop": "Now"}}, "default")
    await delete_object(anna, "flyerjobs", name)
    name = f"lower-{secrets.token_hex(4)}"
    running = job(activeDeadline="90m", status=status("Running"))
    await create_object(anna, "flyerjobs", name, running, operator)
    await anna.merge(RESOURCES["flyerjobs"], name, {"spec": {"activeDeadline": "1h"}}, "default")
    await delete_object(anna, "flyerjobs", name)


async def _unstamped(policies: Cluster, checker: RefusalChecker) -> None:
    """As before Kubernetes 1.36: no creator is stamped, and a claimed name is refused."""
    stamps = "mutatingadmissionpolicybinding/flyerjob-user.fireflyer.dev"
    await asyncio.to_thread(policies.kubectl, "delete", stamps)
    jobs = RESOURCES["flyerjobs"]
    async with await client_as(policies, "anna") as anna:

        async def created(**claims: str) -> dict[str, Any]:
            name = f"claim-{secrets.token_hex(4)}"
            value = object_of("flyerjobs", name, job())
            value["metadata"]["annotations"] = claims
            try:
                created_job = await anna.create(jobs, value, "default")
            finally:
                await delete_object(anna, "flyerjobs", name)
            annotations: dict[str, Any] = created_job["metadata"].get("annotations") or {}
            return annotations

        for _ in range(600):
            if names.USER_ANNOTATION not in await created():
                break
            await asyncio.sleep(0.1)
        await checker.refuses(created(**{names.USER_ANNOTATION: "ben"}), "created by another")
        await checker.refuses(created(**{names.CHANGED_BY_ANNOTATION: "ben"}), "asked by another")
        own = {names.USER_ANNOTATION: "anna"}
        assert await created(**own) == own


async def _check_accepted(operator: Api, name: str, patch: dict[str, Any]) -> None:
    """Write a job's status; the API server may take a moment to see that no epoch forbids it."""
    for _ in range(600):
        with contextlib.suppress(InvalidError):
            await operator.merge(RESOURCES["flyerjobs"], name, patch, "default", "status")
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{patch} was never accepted")


async def _epochs(checker: RefusalChecker, api: Api, operator: Api, name: str) -> None:
    """The leader writes its epoch to the topology; previous leaders cannot write a status."""
    jobs, topologies = RESOURCES["flyerjobs"], RESOURCES["flyertopologies"]
    patch = {"status": {"message": "by epoch 3"}}
    await api.create(topologies, object_of("flyertopologies", "cluster", {"spec": {}}))
    await operator.merge(jobs, name, patch, "default", "status")  # no leader has an epoch yet
    await operator.merge(topologies, "cluster", {"status": {"epoch": 4}}, "", "status")
    for count in range(600):  # until the API server has read the topology
        patch = {"status": {"message": f"by epoch 3, {count}"}}
        if await refused(operator.merge(jobs, name, patch, "default", "status")):
            break
        await asyncio.sleep(0.1)
    late = operator.merge(jobs, name, {"status": {"message": "late"}}, "default", "status")
    await checker.refuses(late, "a leader that was replaced")
    for epoch in (4, 5):
        await operator.merge(jobs, name, {"status": {"epoch": epoch}}, "default", "status")
    await delete_object(api, "flyertopologies", "cluster")


async def _priorities(policies: Cluster, checker: RefusalChecker, api: Api) -> None:
    """Levels above normal require a permission."""
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
    clara = await client_as(policies, "clara", "team")
    async with clara:
        for _ in range(300):  # until the API server has read the roles
            try:
                await clara.create(
                    jobs, object_of("flyerjobs", name, job(priority="high")), "default"
                )
            except ForbiddenError:
                await asyncio.sleep(0.1)
            else:
                break
        key, level = "a level of others", {"priority": "extreme-high"}
        await checker.refuses(clara.merge(jobs, name, {"spec": level}, "default"), key)
        other = object_of("flyerjobs", f"{name}-other", job(**level))
        await checker.refuses(clara.create(jobs, other, "default"), key)
        await clara.merge(jobs, name, {"spec": {"priority": "low"}}, "default")
    await delete_object(api, "flyerjobs", name)
    policies.kubectl("delete", "clusterrole,clusterrolebinding", "test-users")


async def _queues(policies: Cluster, checker: RefusalChecker, api: Api) -> None:
    """A queue that a FlyerQuota names requires a permission in the namespace."""
    jobs, quotas = RESOURCES["flyerjobs"], RESOURCES["flyerquotas"]
    rbac = "rbac.authorization.k8s.io"
    everything = {"apiGroups": [names.GROUP], "resources": ["flyerjobs"], "verbs": ["*"]}
    use = {"apiGroups": [names.GROUP], "resources": ["flyerqueues"], "verbs": ["use"]}
    team = {"kind": "Group", "name": "queued", "apiGroup": rbac}
    for name, rule in (
        ("test-jobs", everything),
        ("test-nightly", {**use, "resourceNames": ["nightly"]}),
    ):
        reference = {"apiGroup": rbac, "kind": "ClusterRole", "name": name}
        metadata = {"metadata": {"name": name}}
        policies.apply(
            {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", **metadata, "rules": [rule]},
            {
                "apiVersion": f"{rbac}/v1", "kind": "ClusterRoleBinding", **metadata,
                "roleRef": reference, "subjects": [team],
            },
        )  # fmt: skip
    for queue in ("nightly", "research", "default"):
        body = {"spec": {"nodes": 4, "queue": queue}}
        await api.create(quotas, object_of("flyerquotas", f"of-{queue}", body))
    name = f"queue-{secrets.token_hex(4)}"
    async with await client_as(policies, "clara", "queued") as clara:

        async def create_queue(labels: dict[str, str] | None = None, **spec: Any) -> None:
            value = object_of("flyerjobs", name, job(**spec))
            value["metadata"]["labels"] = labels or {}
            await clara.create(jobs, value, "default")
            await delete_object(api, "flyerjobs", name)

        for _ in range(300):  # until the API server has read quotas and roles
            with contextlib.suppress(ForbiddenError):
                await create_queue(queue="nightly")
                if await refused(create_queue(queue="research")):
                    break
            await asyncio.sleep(0.1)
        await delete_object(api, "flyerjobs", name)
        key = "a queue of others"
        await checker.refuses(create_queue(queue="research"), key)
        await checker.refuses(create_queue({names.QUEUE_LABEL: "research"}), key)
        for spec in ({"queue": "nightly"}, {"queue": "free"}, {"queue": "default"}, {}):
            await create_queue(**spec)
        await create_queue({names.QUEUE_LABEL: "research"}, queue="nightly")
        value = object_of("flyerjobs", name, job(queue="free"))
        await clara.create(jobs, value, "default")
        moved = clara.merge(jobs, name, {"spec": {"queue": "research"}}, "default")
        await checker.refuses(moved, key)
        # A job in a queue that its user may not use can still be changed in other fields.
        await api.merge(jobs, name, {"spec": {"queue": "research"}}, "default")
        await clara.merge(jobs, name, {"spec": {"maxRestarts": 3}}, "default")
    await delete_object(api, "flyerjobs", name)
    for queue in ("nightly", "research", "default"):
        await delete_object(api, "flyerquotas", f"of-{queue}")
    policies.kubectl("delete", "clusterrole,clusterrolebinding", "test-jobs", "test-nightly")


async def _healths(policies: Cluster, checker: RefusalChecker, api: Api) -> None:
    """An agent writes only the NodeHealth of the node on which it runs."""
    healths = RESOURCES["nodehealths"]
    own, other = (
        await client_as(policies, AGENT, node="a1"),
        await client_as(policies, AGENT, node="b7"),
    )
    unbound, anna = await client_as(policies, AGENT), await client_as(policies, "anna")
    async with own, other, unbound, anna:
        agent_health = object_of("nodehealths", "a1", {"spec": {}})
        await checker.refuses(
            other.create(healths, agent_health), "an object by the agent of another node"
        )
        await checker.refuses(
            unbound.create(healths, agent_health), "an object by an agent of no node"
        )
        await own.create(healths, agent_health)
        patch = {"status": {"state": "Healthy"}}
        await own.merge(healths, "a1", patch, "", "status")
        false_report = {"status": {"state": "Unknown", "reason": "DriverHangs"}}
        for writer, key in (
            (other, "a health by the agent of another node"),
            (unbound, "a health by an agent of no node"),
            (anna, "a health by anna"),
        ):
            await checker.refuses(writer.merge(healths, "a1", false_report, "", "status"), key)
        elsewhere = object_of("nodehealths", "a2", {"spec": {}})
        await checker.refuses(other.create(healths, elsewhere), "an object of another node")
        drain = {"spec": {"drain": {"reason": "disk", "by": "anna"}}}
        for call in (other.merge(healths, "a1", drain), other.delete(healths, "a1")):
            await checker.refuses(call, "an object by the agent of another node")
        # Users may drain the node and delete the object.
        assert (await anna.merge(healths, "a1", drain))["spec"]["drain"]["by"] == "anna"
        await anna.delete(healths, "a1")
        # The agent may delete it too.
        await own.create(healths, agent_health)
        await own.delete(healths, "a1")
