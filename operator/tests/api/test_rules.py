"""The CRDs' rules and the admission policies, asked of a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import crd, names
from flyer.kube.client import Access, Api, find_access
from flyer.kube.client import resources as known
from flyer.kube.client.errors import ApiError, ForbiddenError, InvalidError, NotFoundError
from flyer.sim import sample_job

from .rule_cases import CASES, NODES, RUNNING, TEMPLATE, TIME, Case, job, status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

    from e2e.cluster.handle import Cluster

CRDS = Path(__file__).parents[3] / "crds"
RESOURCES = {
    one.plural: one
    for one in (
        known.FLYERJOBS, known.FLYERQUOTAS, known.FLYERTOPOLOGIES, known.NODEHEALTHS,
    )
}  # fmt: skip
KINDS = {kind.plural: kind.kind for kind in crd.KINDS}
OPERATOR = "system:serviceaccount:fireflyer-system:flyer-operator"
AGENT = "system:serviceaccount:fireflyer-system:flyer-node"


def schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for part in schema.get("properties", {}).values():
        yield from schemas(part)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from schemas(schema[name])


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for kind in crd.KINDS
        for version in crd.crd(kind)["spec"]["versions"]
        for schema in schemas(version["schema"]["openAPIV3Schema"])
        for rule in schema.get("x-kubernetes-validations", [])
    ]


def test_every_rule_has_a_case_that_breaks_it() -> None:
    for rule in rules():
        text = rule["message"]
        if "messageExpression" in rule:
            text = re.fullmatch(r"'(.*)'\.format\(\[.*\]\)", rule["messageExpression"])[1]
        pattern = re.sub(r"%[ds]", ".*", re.escape(text.replace("\\'", "'")))
        assert any(re.fullmatch(pattern, case.says) for case in CASES), rule["message"]


def test_every_message_names_a_remedy() -> None:
    for rule in rules():
        assert ":" in rule["message"], rule
        assert re.search(r"(: [a-z]|, [a-z])", rule["message"]), rule


@pytest.fixture(scope="session")
def kinds(control_plane: Cluster) -> Cluster:
    """The API server with our kinds."""
    control_plane.kubectl("apply", "--server-side", "-f", str(CRDS))
    control_plane.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all", deadline_s=70
    )
    return control_plane


@pytest.fixture
async def api(kinds: Cluster) -> AsyncIterator[Api]:
    access = await find_access(kinds.kubeconfig)
    async with Api(access, agent="tests") as found:
        yield found


async def acting(kinds: Cluster, user: str, *groups: str, node: str = "") -> Api:
    """The same server, seen by somebody else."""
    access = await find_access(kinds.kubeconfig)

    async def headers() -> dict[str, str]:
        found = {**await access.headers(), "Impersonate-User": user}
        found["Impersonate-Group"] = groups[0] if groups else "system:masters"
        if node:
            found["Impersonate-Extra-authentication.kubernetes.io%2Fnode-name"] = node
        return found

    return Api(Access(access.url, access.context, headers), agent="tests")


def named(plural: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if plural == names.PLURAL_JOBS:
        metadata["namespace"] = "default"
    return {
        "apiVersion": names.API_VERSION, "kind": KINDS[plural], "metadata": metadata, **body,
    }  # fmt: skip


async def stored(
    api: Api, plural: str, name: str, before: dict[str, Any], operator: Api | None = None
) -> None:
    resource, namespace = RESOURCES[plural], _namespace(plural)
    wanted = {key: value for key, value in before.items() if key != "status"}
    await api.create(resource, named(plural, name, wanted), namespace)
    if "status" in before:
        patch = {"status": before["status"]}
        await (operator or api).merge(resource, name, patch, namespace, "status")


def _namespace(plural: str) -> str:
    return "default" if plural == names.PLURAL_JOBS else ""


async def gone(api: Api, plural: str, name: str) -> None:
    with contextlib.suppress(NotFoundError):
        await api.delete(RESOURCES[plural], name, _namespace(plural))


RULES = [case for case in CASES if not case.policy]


@pytest.mark.parametrize("case", RULES, ids=[case.name for case in RULES])
async def test_a_rule_refuses_and_says_why(case: Case, api: Api) -> None:
    name = case.fixed_name or f"case-{secrets.token_hex(4)}"
    await gone(api, case.plural, name)
    try:
        with pytest.raises(InvalidError) as refusal:
            await _broken(api, api, case, name)
        assert case.says in str(refusal.value)
    finally:
        await gone(api, case.plural, name)


async def _broken(api: Api, operator: Api, case: Case, name: str) -> None:
    await stored(api, case.plural, name, case.before, operator)
    resource, namespace = RESOURCES[case.plural], _namespace(case.plural)
    await api.merge(resource, name, case.edit, namespace, case.subresource)


async def test_what_the_engine_writes_is_taken(api: Api) -> None:
    """A whole life: every status that the rules are about moves along as it should."""
    name = f"life-{secrets.token_hex(4)}"
    await stored(api, "flyerjobs", name, job())
    starting = status("Starting")
    for step in (
        status("Queued", attempt=0),
        starting,
        status("Running"),
        status("Suspending", suspendCode=3),
        status("Queued", suspendCode=3),
        {**status("Draining", attempt=2), "epoch": 4, "suspendCode": 0},
        {**status("Starting", attempt=2), "epoch": 4},
        {**status("Succeeded", attempt=2), "epoch": 4},
    ):
        found = await api.get(RESOURCES["flyerjobs"], name, "default")
        found["status"] = step
        await api.replace(RESOURCES["flyerjobs"], found, "status")
    await gone(api, "flyerjobs", name)


async def test_a_job_that_waits_may_be_changed(api: Api) -> None:
    name = f"waits-{secrets.token_hex(4)}"
    await stored(api, "flyerjobs", name, job(status=status("Suspended")))
    patch = {"spec": {"nodes": 3, "group": "a100", "priority": "low", "suspend": True}}
    changed = await api.merge(RESOURCES["flyerjobs"], name, patch, "default")
    assert changed["spec"]["nodes"] == 3
    await gone(api, "flyerjobs", name)


async def test_the_token_is_released_and_given_again(api: Api) -> None:
    holder = {"namespace": "ml", "job": "gpt", "epoch": 4, "since": TIME}
    topologies = RESOURCES["flyertopologies"]
    await gone(api, "flyertopologies", "cluster")
    await stored(api, "flyertopologies", "cluster", {"spec": {}})
    for epoch, held in ((4, holder), (6, None), (6, {**holder, "job": "bert", "epoch": 6})):
        patch = {"status": {"epoch": epoch, "holder": held}}
        await api.merge(topologies, "cluster", patch, "", "status")
    await gone(api, "flyertopologies", "cluster")


async def test_defaults_and_null(api: Api) -> None:
    name = f"defaults-{secrets.token_hex(4)}"
    await stored(api, "flyerjobs", name, job(watchdog=None))
    found = await api.get(RESOURCES["flyerjobs"], name, "default")
    assert found["spec"]["watchdog"] is None
    assert found["spec"]["preemption"] == {"grace": "1m", "maxGrace": "10m", "minRuntime": "15m"}
    await gone(api, "flyerjobs", name)


async def test_columns_and_short_names(kinds: Cluster, api: Api) -> None:
    await stored(api, "flyerjobs", "column", job())
    await stored(api, "flyerquotas", "column", {"spec": {"nodes": 4}})
    await stored(api, "flyertopologies", "cluster", {"spec": {}})
    await stored(api, "nodehealths", "column", {"spec": {}})
    for short, wanted in (
        ("fj", "NAME STATE REASON NODES ZONE PRIORITY PROGRESS RESTARTS AGE"),
        ("fq", "NAME USER PRIORITY GROUP USED NODES EXPIRES AGE"),
        ("ft", "NAME CROSS-ZONE HOLDER NAMESPACE AGE"),
        ("nh", "NAME STATE REASON GPUS HCAS VALIDATED DRAINED-BY AGE"),
    ):
        table = await asyncio.to_thread(kinds.kubectl, "get", short, "-n", "default")
        assert " ".join(table.splitlines()[0].split()) == wanted
    listed = await asyncio.to_thread(kinds.kubectl, "get", "fireflyer", "-o", "name")
    assert "flyerjob.fireflyer.dev/column" in listed
    for plural in RESOURCES:
        await gone(api, plural, "cluster" if plural == "flyertopologies" else "column")


def test_explain_reads_well(kinds: Cluster) -> None:
    told = kinds.kubectl("explain", "flyerjob.spec")
    assert "What to run, on how many whole nodes, and how it may be interrupted." in told
    assert "<no description>" not in kinds.kubectl("explain", "flyerjob", "--recursive")


# -- who may do what ---------------------------------------------------------------------------


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
            await _broken(anna, operator, case, name)
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


def test_the_samples_are_what_the_server_takes() -> None:
    """The structural part that needs no server: what Python makes, the schema names."""
    made = sample_job("one", 2).to_object()
    properties = crd.flyerjob_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert set(made["spec"]) <= set(properties["properties"]["spec"]["properties"])
    assert TEMPLATE["spec"]["containers"][0]["name"] == "trainer"
    assert len(NODES) == 2
