"""Pods, sizes and caps: what a tenant and the operator's own account may not do."""

from __future__ import annotations

import asyncio
import base64
import copy
import secrets
from typing import TYPE_CHECKING, Any

from flyer.api.podpolicies import CRITICAL_PRIORITY
from flyer.kube.apiserver import resources
from flyer.kube.apiserver.errors import ApiError, ForbiddenError

from .real_api import OPERATOR, RESOURCES, client_as, delete_object, object_of
from .rule_cases import job

if TYPE_CHECKING:
    from flyer.kube.apiserver import Api

    from testcluster.handle import Cluster

    from .policy_refusals import RefusalChecker

DEDICATED = "fireflyer.dev/dedicated"
COLLECTOR = "system:serviceaccount:kube-system:generic-garbage-collector"
POD_COLLECTOR = "system:serviceaccount:kube-system:pod-garbage-collector"
DAEMON_SETS = "system:serviceaccount:kube-system:daemon-set-controller"
JOBS = "flyer-job"
CLASSES = {JOBS: 1000, "flyer-control": 900_000_000, "test-urgent": CRITICAL_PRIORITY,
           "test-high": CRITICAL_PRIORITY - 1}  # fmt: skip
HOOK = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "MutatingWebhookConfiguration",
    "metadata": {"name": "flyer-injection"},
    "webhooks": [
        {
            "name": "injection.fireflyer.dev",
            "clientConfig": {"service": {"name": "w", "namespace": "fireflyer-system"}},
            "admissionReviewVersions": ["v1"],
            "failurePolicy": "Ignore",
            "sideEffects": "None",
            "objectSelector": {"matchLabels": {"fireflyer.dev/inject": "nothing"}},
            "rules": [
                {
                    "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
                    "resources": ["pods"],
                }
            ],
        }
    ],
}  # fmt: skip


def pod(name: str, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    body = {"containers": [{"name": "a", "image": "i"}], "automountServiceAccountToken": False}
    metadata: dict[str, Any] = {"name": name, "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**body, **spec}}


def tolerating(key: str | None, effect: str | None = "NoSchedule") -> list[dict[str, str]]:
    toleration = {"key": key, "operator": "Exists", "effect": effect}
    return [{name: value for name, value in toleration.items() if value is not None}]


async def pods_and_sizes(cluster: Cluster, checker: RefusalChecker, api: Api) -> None:
    _rights(cluster)
    anna = await client_as(cluster, "anna", "people")
    operator = await client_as(cluster, OPERATOR, "people")
    controller = await client_as(cluster, DAEMON_SETS, "people")
    collector = await client_as(cluster, COLLECTOR, "people")
    pod_collector = await client_as(cluster, POD_COLLECTOR, "people")
    async with anna, operator, controller, collector, pod_collector:
        await _wait_for_roles(anna)
        job_object = await api.create(
            RESOURCES["flyerjobs"], object_of("flyerjobs", "gpt", job()), "default"
        )
        owner = {
            "apiVersion": "fireflyer.dev/v1alpha1", "kind": "FlyerJob", "name": "gpt",
            "uid": job_object["metadata"]["uid"], "controller": True,
        }  # fmt: skip
        await _labels(checker, anna, operator, api, owner)
        await _job_pods(checker, anna, operator, collector, api, owner)
        await _evictions(checker, anna, pod_collector, operator, api, owner)
        await _dedicated(checker, anna, controller)
        await _priority_classes(cluster, checker, anna, controller, operator, owner)
        await _operators_own(cluster, checker, operator, api, owner)
        await delete_object(api, "flyerjobs", "gpt")
    await _caps(checker, api)
    async with await client_as(cluster, "anna") as root:
        await _sizes(checker, root)
    roles = ("test-people", "test-system", "test-operator")
    cluster.kubectl("delete", "clusterrolebinding", *roles)
    cluster.kubectl("delete", "clusterrole", *roles)


def _rights(cluster: Cluster) -> None:
    def role(name: str, group: str, *rules: dict[str, Any]) -> list[dict[str, Any]]:
        api = "rbac.authorization.k8s.io"
        return [
            {
                "apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name},
                "rules": list(rules),
            },
            {
                "apiVersion": f"{api}/v1", "kind": "ClusterRoleBinding",
                "metadata": {"name": name},
                "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": name},
                "subjects": [{"kind": "Group", "name": group, "apiGroup": api}],
            },
        ]  # fmt: skip

    everything = {"apiGroups": ["", "admissionregistration.k8s.io"], "verbs": ["*"]}
    listed = ["pods", "pods/eviction", "mutatingwebhookconfigurations"]
    use = {"apiGroups": ["fireflyer.dev"], "resources": ["flyernodes"], "verbs": ["use"]}
    cluster.apply(*role("test-people", "people", {**everything, "resources": listed}))
    # As in the chart: the service accounts of system namespaces.
    classes = {"apiGroups": ["scheduling.k8s.io"], "resources": ["priorityclasses"]}
    system = role(
        "test-system", "system:serviceaccounts:kube-system", use, {**classes, "verbs": ["use"]}
    )
    controller = {"kind": "User", "name": DAEMON_SETS, "apiGroup": "rbac.authorization.k8s.io"}
    system[1]["subjects"] += [controller, {**controller, "name": POD_COLLECTOR}]
    cluster.apply(*system)
    # As in the chart: the operator.
    operator = role(
        "test-operator", "unused", {**classes, "resourceNames": [JOBS], "verbs": ["use"]}
    )
    operator[1]["subjects"] = [{**controller, "name": OPERATOR}]
    cluster.apply(*operator)
    for namespace in ("default", "kube-system", "fireflyer-system"):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        account = {"name": "default", "namespace": namespace}
        account_object = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}
        cluster.apply(account_object, namespace=namespace)


async def _wait_for_roles(anna: Api) -> None:
    """Wait until the API server's authorizer has read the roles."""
    for _ in range(300):
        try:
            await _create_and_delete(anna, pod("probe"))
        except ForbiddenError:
            await asyncio.sleep(0.1)
        else:
            return
    raise AssertionError("anna may never create a pod")


async def _create_and_delete(api: Api, body: dict[str, Any], namespace: str = "default") -> None:
    """Create a pod and delete it."""
    body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
    created_pod = await api.create(resources.PODS, body, namespace)
    await api.delete(resources.PODS, created_pod["metadata"]["name"], namespace, grace_seconds=0)


async def _labels(
    checker: RefusalChecker, anna: Api, operator: Api, api: Api, owner: dict[str, Any]
) -> None:
    marked = pod("marked", {"fireflyer.dev/job": "missing", "app": "z"})
    await checker.refuses(_create_and_delete(anna, marked), "a pod of a job by anna")
    await anna.create(resources.PODS, pod("plain", {"app": "z"}), "default")
    leads = {"metadata": {"labels": {"fireflyer.dev/leader": "true"}}}
    await checker.refuses(
        anna.merge(resources.PODS, "plain", leads, "default"), "a pod that becomes a leader"
    )
    await anna.merge(resources.PODS, "plain", {"metadata": {"labels": {"app": "y"}}}, "default")
    await api.delete(resources.PODS, "plain", "default", grace_seconds=0)
    owned = pod("owned", {"fireflyer.dev/job": "gpt"}, tolerations=tolerating(DEDICATED))
    owned["metadata"]["ownerReferences"] = [owner]
    await operator.create(resources.PODS, owned, "default")
    # Users may change other labels, but not remove the job's.
    await anna.merge(resources.PODS, "owned", {"metadata": {"labels": {"mine": "1"}}}, "default")
    unlabelled = {"metadata": {"labels": {"fireflyer.dev/job": None}}}
    await checker.refuses(
        anna.merge(resources.PODS, "owned", unlabelled, "default"), "a pod of a job by anna"
    )
    await operator.delete(resources.PODS, "owned", "default", grace_seconds=0)


async def _job_pods(
    checker: RefusalChecker,
    anna: Api,
    operator: Api,
    collector: Api,
    api: Api,
    owner: dict[str, Any],
) -> None:
    """A pod of a job neither leaves its job nor disappears while its processes may run."""
    body = pod("run", nodeName="n1", tolerations=tolerating(DEDICATED))
    body["metadata"]["ownerReferences"] = [owner]
    await operator.create(resources.PODS, body, "default")
    foreign = {**owner, "uid": "00000000-0000-0000-0000-000000000000"}
    for user, key in ((anna, "a pod that leaves its job"), (collector, "an orphaned pod")):
        for references in (
            None,
            [],
            [foreign],
            [{**owner, "controller": False}],
            [{**owner, "apiVersion": "example.com/v1"}],
        ):
            patch = {"metadata": {"ownerReferences": references}}
            await checker.refuses(user.merge(resources.PODS, "run", patch, "default"), key)
    # Foreground deletion of a job changes this field; the owner of the pod remains.
    blocks = {"metadata": {"ownerReferences": [{**owner, "blockOwnerDeletion": False}]}}
    await collector.merge(resources.PODS, "run", blocks, "default")

    forced = anna.delete(resources.PODS, "run", "default", grace_seconds=0)
    await checker.refuses(forced, "a pod deleted by force")
    await anna.delete(resources.PODS, "run", "default", grace_seconds=1)
    forced = anna.delete(resources.PODS, "run", "default", grace_seconds=0)
    await checker.refuses(forced, "a pod deleted by force")
    # A deletion without a grace period uses the pod's: 0 would remove the pod immediately.
    zero_grace = pod("run", nodeName="n1", tolerations=tolerating(DEDICATED))
    zero_grace["metadata"] |= {"name": "no-grace", "ownerReferences": [owner]}
    zero_grace["spec"]["terminationGracePeriodSeconds"] = 0
    await operator.create(resources.PODS, zero_grace, "default")
    await checker.refuses(
        anna.delete(resources.PODS, "no-grace", "default"), "a pod without a grace"
    )
    await anna.delete(resources.PODS, "no-grace", "default", grace_seconds=1)
    # Pods that have ended, or never ran, may be deleted by force.
    failed = {"status": {"phase": "Failed"}}
    await api.merge(resources.PODS, "no-grace", failed, "default", "status")
    await anna.delete(resources.PODS, "no-grace", "default", grace_seconds=0)
    await api.merge(resources.PODS, "run", failed, "default", "status")
    await anna.delete(resources.PODS, "run", "default", grace_seconds=0)
    waiting = pod("wait")
    waiting["metadata"]["ownerReferences"] = [owner]
    await operator.create(resources.PODS, waiting, "default")
    await anna.delete(resources.PODS, "wait", "default", grace_seconds=0)


async def _evictions(
    checker: RefusalChecker,
    anna: Api,
    pod_collector: Api,
    operator: Api,
    api: Api,
    owner: dict[str, Any],
) -> None:
    """An eviction cannot bypass the rule; remaining pods of a lost node are deleted."""
    body = pod("run", nodeName="n1", tolerations=tolerating(DEDICATED))
    body["metadata"]["ownerReferences"] = [owner]

    def eviction(grace_seconds: int) -> dict[str, Any]:
        return {
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": "run", "namespace": "default"},
            "deleteOptions": {"gracePeriodSeconds": grace_seconds},
        }  # fmt: skip

    await operator.create(resources.PODS, body, "default")
    forced = anna.post(resources.PODS, "run", "default", "eviction", eviction(0))
    await checker.refuses(forced, "a pod evicted by force")
    await anna.post(resources.PODS, "run", "default", "eviction", eviction(1))
    await pod_collector.delete(resources.PODS, "run", "default", grace_seconds=0)


async def _dedicated(checker: RefusalChecker, anna: Api, controller: Api) -> None:
    key = "a toleration of dedicated nodes"
    for key_of, effect in (
        (DEDICATED, "NoSchedule"),
        (DEDICATED, None),
        (None, "NoSchedule"),
        (None, None),
    ):
        tolerations = tolerating(key_of, effect)
        await checker.refuses(_create_and_delete(anna, pod("t", tolerations=tolerations)), key)
    await checker.refuses(_create_and_delete(anna, pod("t", nodeName="n1")), "a node by its name")
    for tolerations in (
        tolerating("other"),
        tolerating(None, "NoExecute"),
        tolerating(DEDICATED, "NoExecute"),
    ):
        await _create_and_delete(anna, pod("t", tolerations=tolerations))
    # A tenant's DaemonSet cannot bypass the rule; one in a system namespace has the right.
    tolerates_all = pod("t", tolerations=tolerating(None))
    try:
        await _create_and_delete(controller, tolerates_all)
    except ForbiddenError as error:
        assert "service account default/default" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the pod was created with the controller's permission")
    await _create_and_delete(controller, tolerates_all, "kube-system")


async def _priority_classes(
    cluster: Cluster,
    checker: RefusalChecker,
    anna: Api,
    controller: Api,
    operator: Api,
    owner: dict[str, Any],
) -> None:
    for name, value in CLASSES.items():
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
        cluster.apply({**kind, "metadata": {"name": name}, "value": value})

    def classed(name: str) -> dict[str, Any]:
        return pod("t", priorityClassName=name)

    async def wait_for_class() -> None:
        """Wait until the API server has read the class."""
        for _ in range(300):
            try:
                await _create_and_delete(anna, classed("test-high"))
            except ForbiddenError:
                await asyncio.sleep(0.1)
            else:
                return
        raise AssertionError("the API server has not read the class in time")

    try:
        await wait_for_class()
        system = "system-node-critical"
        await checker.refuses(
            _create_and_delete(anna, classed(JOBS)), "a priority class of the chart"
        )
        await checker.refuses(
            _create_and_delete(anna, classed(system)), "a priority class of the system"
        )
        await checker.refuses(
            _create_and_delete(anna, classed("test-urgent")), "a priority class above the services"
        )
        # A tenant's DaemonSet cannot bypass the rule; one in a system namespace has the right.
        try:
            await _create_and_delete(controller, classed(system))
        except ForbiddenError as error:
            assert "service account default/default" in str(error)  # noqa: PT017
        else:
            raise AssertionError("the pod was created with the controller's permission")
        await _create_and_delete(controller, classed(system), "kube-system")
        # The operator creates pods from a tenant's template, which may name only a class for jobs.
        for name, key in (
            ("flyer-control", "a priority class of the chart in a template"),
            (system, "a priority class of the system in a template"),
        ):
            owned = classed(name)
            owned["metadata"]["ownerReferences"] = [owner]
            await checker.refuses(_create_and_delete(operator, owned), key)
        owned = classed(JOBS)
        owned["metadata"]["ownerReferences"] = [owner]
        await _create_and_delete(operator, owned)
    finally:
        cluster.kubectl("delete", "priorityclass", *CLASSES)


async def _operators_own(
    cluster: Cluster, checker: RefusalChecker, operator: Api, api: Api, owner: dict[str, Any]
) -> None:
    await checker.refuses(
        _create_and_delete(operator, pod("op")), "a pod without a job by the operator"
    )
    owned = pod("op")
    owned["metadata"]["ownerReferences"] = [owner]
    key = "a pod of the system by the operator"
    await checker.refuses(_create_and_delete(operator, owned, "kube-system"), key)
    await _create_and_delete(operator, owned)
    await api.create(resources.PODS, pod("op"), "default")
    foreign = operator.delete(resources.PODS, "op", "default")
    await checker.refuses(foreign, "a pod without a job by the operator")
    await api.delete(resources.PODS, "op", "default", grace_seconds=0)
    # The operator labels the leader's pod in its namespace.
    await api.create(resources.PODS, pod("me"), "fireflyer-system")
    leads = {"metadata": {"labels": {"fireflyer.dev/leader": "true"}}}
    await operator.merge(resources.PODS, "me", leads, "fireflyer-system")
    await api.delete(resources.PODS, "me", "fireflyer-system", grace_seconds=0)

    cluster.apply(HOOK)
    try:
        bundle = base64.b64encode(b"").decode()
        hooks = HOOK["webhooks"]
        assert isinstance(hooks, list)
        trusted = {**hooks[0], "clientConfig": {**hooks[0]["clientConfig"], "caBundle": bundle}}
        hook = "flyer-injection"
        await operator.merge(resources.WEBHOOKS, hook, {"webhooks": [trusted]})
        for change in (
            {"objectSelector": {}},
            {"failurePolicy": "Fail"},
            {"clientConfig": {"url": "https://elsewhere.example/"}},
            {"name": "other.fireflyer.dev"},
            {"rules": [{**hooks[0]["rules"][0], "resources": ["pods", "secrets"]}]},
        ):
            write = operator.merge(resources.WEBHOOKS, hook, {"webhooks": [{**trusted, **change}]})
            await checker.refuses(write, "a webhook by the operator")
    finally:
        cluster.kubectl("delete", "mutatingwebhookconfiguration", "flyer-injection")


async def _refuses(checker: RefusalChecker, api: Api, key: str, value: dict[str, Any]) -> None:
    """Require a refusal, once the API server has read the policy's parameter."""
    for _ in range(300):
        name = value["metadata"]["name"]
        try:
            await api.create(RESOURCES["flyerjobs"], value, "default")
        except ApiError:
            break
        await delete_object(api, "flyerjobs", name)
        await asyncio.sleep(0.1)
    await checker.refuses(api.create(RESOURCES["flyerjobs"], value, "default"), key)


async def _caps(checker: RefusalChecker, api: Api) -> None:
    name = f"caps-{secrets.token_hex(4)}"
    topologies = RESOURCES["flyertopologies"]
    await api.create(topologies, object_of("flyertopologies", "cluster", {"spec": {}}))
    for field, value in (
        ("checkpointGracePeriod", "16m"),
        ("maxCheckpointGracePeriod", "87840h"),
        ("minRuntime", "87840h"),
    ):
        more = (
            {"checkpointGracePeriod": "1m", "maxCheckpointGracePeriod": "1h"}
            if field != "checkpointGracePeriod"
            else {"maxCheckpointGracePeriod": "1h"}
        )
        body = object_of("flyerjobs", name, job(preemption={**more, field: value}))
        await _refuses(checker, api, f"a long {field}", body)
    within = {"checkpointGracePeriod": "15m", "maxCheckpointGracePeriod": "1h", "minRuntime": "2h"}
    jobs = RESOURCES["flyerjobs"]
    await api.create(jobs, object_of("flyerjobs", name, job(preemption=within)), "default")
    # A job within the caps can be changed.
    await api.merge(jobs, name, {"spec": {"maxRestarts": 3}}, "default")
    await delete_object(api, "flyerjobs", name)
    await delete_object(api, "flyertopologies", "cluster")


async def _sizes(checker: RefusalChecker, api: Api) -> None:
    jobs = RESOURCES["flyerjobs"]
    name = f"size-{secrets.token_hex(4)}"

    def sized(**metadata: Any) -> dict[str, Any]:
        value = copy.deepcopy(object_of("flyerjobs", name, job()))
        value["metadata"].update(metadata)
        return value

    large = {f"a{i}": "x" * 4999 for i in range(4)}  # the policy adds the user
    await checker.refuses(api.create(jobs, sized(annotations=large), "default"), "many annotations")
    labels = {f"l{i}": "x" for i in range(65)}
    await checker.refuses(api.create(jobs, sized(labels=labels), "default"), "many labels")
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y" * 8000}
    finalizers = [f"example.com/{i:04}-{'z' * 38}" for i in range(4)]
    await checker.refuses(
        api.create(jobs, sized(finalizers=finalizers, ownerReferences=[reference]), "default"),
        "many references",
    )
    for env in (
        [{"name": f"E{i}", "value": "x"} for i in range(513)],
        [{"name": "E", "value": "x" * 65537}],
    ):
        value = sized()
        value["spec"]["template"]["spec"]["containers"][0]["env"] = env
        await checker.refuses(api.create(jobs, value, "default"), "a large environment")
    for kind, key in (("labels", "fireflyer.dev/leader"), ("annotations", "x.fireflyer.dev/y")):
        value = sized()
        value["spec"]["template"]["metadata"] = {kind: {"team": "vision", key: "true"}}
        case_name = f"a reserved {kind.removesuffix('s')} of the pods"
        await checker.refuses(api.create(jobs, value, "default"), case_name)
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 20000, "mine": "y"}
    env = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    value = sized(annotations=applied)
    value["spec"]["template"]["spec"]["containers"][0]["env"] = env
    await api.create(jobs, value, "default")
    value["metadata"]["annotations"] = {next(iter(applied)): "x" * 65537}
    text = {"metadata": {"annotations": value["metadata"]["annotations"]}}
    large = "a large copy of the manifest"
    await checker.refuses(api.merge(jobs, name, text, "default"), large)
    await delete_object(api, "flyerjobs", name)
    value["metadata"]["name"] = f"{name}-large"
    await checker.refuses(api.create(jobs, value, "default"), large)
