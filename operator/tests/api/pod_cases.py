"""Pods, sizes and caps: what a tenant and the operator's own account may not do."""

from __future__ import annotations

import asyncio
import base64
import copy
import secrets
from typing import TYPE_CHECKING, Any

from flyer.api.podpolicies import CRITICAL_PRIORITY
from flyer.kube.apiserver import resources as known
from flyer.kube.apiserver.errors import ApiError, ForbiddenError

from .real_api import OPERATOR, RESOURCES, acting, delete_object, named
from .rule_cases import job

if TYPE_CHECKING:
    from flyer.kube.apiserver import Api

    from testcluster.handle import Cluster

    from .policy_words import Reader

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


async def pods_and_sizes(cluster: Cluster, reader: Reader, api: Api) -> None:
    _rights(cluster)
    anna = await acting(cluster, "anna", "people")
    operator = await acting(cluster, OPERATOR, "people")
    controller = await acting(cluster, DAEMON_SETS, "people")
    collector = await acting(cluster, COLLECTOR, "people")
    pod_collector = await acting(cluster, POD_COLLECTOR, "people")
    async with anna, operator, controller, collector, pod_collector:
        await _ready(anna)
        job_object = await api.create(
            RESOURCES["flyerjobs"], named("flyerjobs", "gpt", job()), "default"
        )
        owner = {
            "apiVersion": "fireflyer.dev/v1alpha1", "kind": "FlyerJob", "name": "gpt",
            "uid": job_object["metadata"]["uid"], "controller": True,
        }  # fmt: skip
        await _labels(reader, anna, operator, api, owner)
        await _job_pods(reader, anna, operator, collector, api, owner)
        await _evictions(reader, anna, pod_collector, operator, api, owner)
        await _dedicated(reader, anna, controller)
        await _priority_classes(cluster, reader, anna, controller, operator, owner)
        await _operators_own(cluster, reader, operator, api, owner)
        await delete_object(api, "flyerjobs", "gpt")
    await _caps(reader, api)
    async with await acting(cluster, "anna") as root:
        await _sizes(reader, root)
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
    # As the chart gives it: the service accounts of system namespaces.
    classes = {"apiGroups": ["scheduling.k8s.io"], "resources": ["priorityclasses"]}
    right = role(
        "test-system", "system:serviceaccounts:kube-system", use, {**classes, "verbs": ["use"]}
    )
    controller = {"kind": "User", "name": DAEMON_SETS, "apiGroup": "rbac.authorization.k8s.io"}
    right[1]["subjects"] += [controller, {**controller, "name": POD_COLLECTOR}]
    cluster.apply(*right)
    # As the chart gives it to the operator.
    own = role("test-operator", "unused", {**classes, "resourceNames": [JOBS], "verbs": ["use"]})
    own[1]["subjects"] = [{**controller, "name": OPERATOR}]
    cluster.apply(*own)
    for namespace in ("default", "kube-system", "fireflyer-system"):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        account = {"name": "default", "namespace": namespace}
        account_object = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account}
        cluster.apply(account_object, namespace=namespace)


async def _ready(anna: Api) -> None:
    """RBAC is read from a cache."""
    for _ in range(300):
        try:
            await _dry(anna, pod("probe"))
        except ForbiddenError:
            await asyncio.sleep(0.1)
        else:
            return
    raise AssertionError("anna may never create a pod")


async def _dry(api: Api, body: dict[str, Any], namespace: str = "default") -> None:
    """Create it and take it away."""
    body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
    created_pod = await api.create(known.PODS, body, namespace)
    await api.delete(known.PODS, created_pod["metadata"]["name"], namespace, grace_seconds=0)


async def _labels(
    reader: Reader, anna: Api, operator: Api, api: Api, owner: dict[str, Any]
) -> None:
    marked = pod("marked", {"fireflyer.dev/job": "missing", "app": "z"})
    await reader.refuses(_dry(anna, marked), "a pod of a job by anna")
    await anna.create(known.PODS, pod("plain", {"app": "z"}), "default")
    leads = {"metadata": {"labels": {"fireflyer.dev/leader": "true"}}}
    await reader.refuses(
        anna.merge(known.PODS, "plain", leads, "default"), "a pod that becomes a leader"
    )
    await anna.merge(known.PODS, "plain", {"metadata": {"labels": {"app": "y"}}}, "default")
    await api.delete(known.PODS, "plain", "default", grace_seconds=0)
    owned = pod("owned", {"fireflyer.dev/job": "gpt"}, tolerations=tolerating(DEDICATED))
    owned["metadata"]["ownerReferences"] = [owner]
    await operator.create(known.PODS, owned, "default")
    # Its other labels are its owner's to change, and the job's stay.
    await anna.merge(known.PODS, "owned", {"metadata": {"labels": {"mine": "1"}}}, "default")
    unlabelled = {"metadata": {"labels": {"fireflyer.dev/job": None}}}
    await reader.refuses(
        anna.merge(known.PODS, "owned", unlabelled, "default"), "a pod of a job by anna"
    )
    await operator.delete(known.PODS, "owned", "default", grace_seconds=0)


async def _job_pods(
    reader: Reader, anna: Api, operator: Api, collector: Api, api: Api, owner: dict[str, Any]
) -> None:
    """A pod of a job neither leaves its job nor disappears while its processes may run."""
    body = pod("run", nodeName="n1", tolerations=tolerating(DEDICATED))
    body["metadata"]["ownerReferences"] = [owner]
    await operator.create(known.PODS, body, "default")
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
            await reader.refuses(user.merge(known.PODS, "run", patch, "default"), key)
    # Deleting a job in the foreground changes this, and nothing about whose the pod is.
    blocks = {"metadata": {"ownerReferences": [{**owner, "blockOwnerDeletion": False}]}}
    await collector.merge(known.PODS, "run", blocks, "default")

    forced = anna.delete(known.PODS, "run", "default", grace_seconds=0)
    await reader.refuses(forced, "a pod deleted by force")
    await anna.delete(known.PODS, "run", "default", grace_seconds=1)
    forced = anna.delete(known.PODS, "run", "default", grace_seconds=0)
    await reader.refuses(forced, "a pod deleted by force")
    # One whose own grace is 0 would be removed by any deletion that names none.
    hasty = pod("run", nodeName="n1", tolerations=tolerating(DEDICATED))
    hasty["metadata"] |= {"name": "hasty", "ownerReferences": [owner]}
    hasty["spec"]["terminationGracePeriodSeconds"] = 0
    await operator.create(known.PODS, hasty, "default")
    await reader.refuses(anna.delete(known.PODS, "hasty", "default"), "a pod without a grace")
    await anna.delete(known.PODS, "hasty", "default", grace_seconds=1)
    # What has ended, or never ran, may go at once.
    failed = {"status": {"phase": "Failed"}}
    await api.merge(known.PODS, "hasty", failed, "default", "status")
    await anna.delete(known.PODS, "hasty", "default", grace_seconds=0)
    await api.merge(known.PODS, "run", failed, "default", "status")
    await anna.delete(known.PODS, "run", "default", grace_seconds=0)
    waiting = pod("wait")
    waiting["metadata"]["ownerReferences"] = [owner]
    await operator.create(known.PODS, waiting, "default")
    await anna.delete(known.PODS, "wait", "default", grace_seconds=0)


async def _evictions(
    reader: Reader, anna: Api, pod_collector: Api, operator: Api, api: Api, owner: dict[str, Any]
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

    await operator.create(known.PODS, body, "default")
    forced = anna.post(known.PODS, "run", "default", "eviction", eviction(0))
    await reader.refuses(forced, "a pod evicted by force")
    await anna.post(known.PODS, "run", "default", "eviction", eviction(1))
    await pod_collector.delete(known.PODS, "run", "default", grace_seconds=0)


async def _dedicated(reader: Reader, anna: Api, controller: Api) -> None:
    key = "a toleration of dedicated nodes"
    for key_of, effect in (
        (DEDICATED, "NoSchedule"),
        (DEDICATED, None),
        (None, "NoSchedule"),
        (None, None),
    ):
        tolerations = tolerating(key_of, effect)
        await reader.refuses(_dry(anna, pod("t", tolerations=tolerations)), key)
    await reader.refuses(_dry(anna, pod("t", nodeName="n1")), "a node by its name")
    for tolerations in (
        tolerating("other"),
        tolerating(None, "NoExecute"),
        tolerating(DEDICATED, "NoExecute"),
    ):
        await _dry(anna, pod("t", tolerations=tolerations))
    # A tenant's DaemonSet cannot bypass the rule; one in a system namespace has the right.
    wild = pod("t", tolerations=tolerating(None))
    try:
        await _dry(controller, wild)
    except ForbiddenError as error:
        assert "service account default/default" in str(error)  # noqa: PT017
    else:
        raise AssertionError("the controller's right was the tenant's")
    await _dry(controller, wild, "kube-system")


async def _priority_classes(
    cluster: Cluster,
    reader: Reader,
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

    async def ready() -> None:
        """The API server reads classes from a watch."""
        for _ in range(300):
            try:
                await _dry(anna, classed("test-high"))
            except ForbiddenError:
                await asyncio.sleep(0.1)
            else:
                return
        raise AssertionError("the class is never known")

    try:
        await ready()
        system = "system-node-critical"
        await reader.refuses(_dry(anna, classed(JOBS)), "a priority class of the chart")
        await reader.refuses(_dry(anna, classed(system)), "a priority class of the system")
        await reader.refuses(
            _dry(anna, classed("test-urgent")), "a priority class above the services"
        )
        # A tenant's DaemonSet cannot bypass the rule; one in a system namespace has the right.
        try:
            await _dry(controller, classed(system))
        except ForbiddenError as error:
            assert "service account default/default" in str(error)  # noqa: PT017
        else:
            raise AssertionError("the controller's right was the tenant's")
        await _dry(controller, classed(system), "kube-system")
        # Of pods that the operator makes the template is the tenant's, and the class the chart's.
        for name, key in (
            ("flyer-control", "a priority class of the chart in a template"),
            (system, "a priority class of the system in a template"),
        ):
            owned = classed(name)
            owned["metadata"]["ownerReferences"] = [owner]
            await reader.refuses(_dry(operator, owned), key)
        owned = classed(JOBS)
        owned["metadata"]["ownerReferences"] = [owner]
        await _dry(operator, owned)
    finally:
        cluster.kubectl("delete", "priorityclass", *CLASSES)


async def _operators_own(
    cluster: Cluster, reader: Reader, operator: Api, api: Api, owner: dict[str, Any]
) -> None:
    await reader.refuses(_dry(operator, pod("op")), "a pod without a job by the operator")
    owned = pod("op")
    owned["metadata"]["ownerReferences"] = [owner]
    key = "a pod of the system by the operator"
    await reader.refuses(_dry(operator, owned, "kube-system"), key)
    await _dry(operator, owned)
    await api.create(known.PODS, pod("op"), "default")
    foreign = operator.delete(known.PODS, "op", "default")
    await reader.refuses(foreign, "a pod without a job by the operator")
    await api.delete(known.PODS, "op", "default", grace_seconds=0)
    # It marks who leads, in its own namespace.
    await api.create(known.PODS, pod("me"), "fireflyer-system")
    leads = {"metadata": {"labels": {"fireflyer.dev/leader": "true"}}}
    await operator.merge(known.PODS, "me", leads, "fireflyer-system")
    await api.delete(known.PODS, "me", "fireflyer-system", grace_seconds=0)

    cluster.apply(HOOK)
    try:
        bundle = base64.b64encode(b"").decode()
        hooks = HOOK["webhooks"]
        assert isinstance(hooks, list)
        trusted = {**hooks[0], "clientConfig": {**hooks[0]["clientConfig"], "caBundle": bundle}}
        hook = "flyer-injection"
        await operator.merge(known.WEBHOOKS, hook, {"webhooks": [trusted]})
        for change in (
            {"objectSelector": {}},
            {"failurePolicy": "Fail"},
            {"clientConfig": {"url": "https://elsewhere.example/"}},
            {"name": "other.fireflyer.dev"},
            {"rules": [{**hooks[0]["rules"][0], "resources": ["pods", "secrets"]}]},
        ):
            write = operator.merge(known.WEBHOOKS, hook, {"webhooks": [{**trusted, **change}]})
            await reader.refuses(write, "a webhook by the operator")
    finally:
        cluster.kubectl("delete", "mutatingwebhookconfiguration", "flyer-injection")


async def _refuses(reader: Reader, api: Api, key: str, value: dict[str, Any]) -> None:
    """The policy's parameter is read from a watch."""
    for _ in range(300):
        name = value["metadata"]["name"]
        try:
            await api.create(RESOURCES["flyerjobs"], value, "default")
        except ApiError:
            break
        await delete_object(api, "flyerjobs", name)
        await asyncio.sleep(0.1)
    await reader.refuses(api.create(RESOURCES["flyerjobs"], value, "default"), key)


async def _caps(reader: Reader, api: Api) -> None:
    name = f"caps-{secrets.token_hex(4)}"
    topologies = RESOURCES["flyertopologies"]
    await api.create(topologies, named("flyertopologies", "cluster", {"spec": {}}))
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
        body = named("flyerjobs", name, job(preemption={**more, field: value}))
        await _refuses(reader, api, f"a long {field}", body)
    within = {"checkpointGracePeriod": "15m", "maxCheckpointGracePeriod": "1h", "minRuntime": "2h"}
    jobs = RESOURCES["flyerjobs"]
    await api.create(jobs, named("flyerjobs", name, job(preemption=within)), "default")
    # What was there before the caps were lowered can still be changed elsewhere.
    await api.merge(jobs, name, {"spec": {"maxRestarts": 3}}, "default")
    await delete_object(api, "flyerjobs", name)
    await delete_object(api, "flyertopologies", "cluster")


async def _sizes(reader: Reader, api: Api) -> None:
    jobs = RESOURCES["flyerjobs"]
    name = f"size-{secrets.token_hex(4)}"

    def sized(**metadata: Any) -> dict[str, Any]:
        value = copy.deepcopy(named("flyerjobs", name, job()))
        value["metadata"].update(metadata)
        return value

    large = {f"a{i}": "x" * 4999 for i in range(4)}  # and who created it, of four letters
    await reader.refuses(api.create(jobs, sized(annotations=large), "default"), "many annotations")
    labels = {f"l{i}": "x" for i in range(65)}
    await reader.refuses(api.create(jobs, sized(labels=labels), "default"), "many labels")
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "y" * 8000}
    ends = [f"example.com/{i:04}-{'z' * 38}" for i in range(4)]
    await reader.refuses(
        api.create(jobs, sized(finalizers=ends, ownerReferences=[reference]), "default"),
        "many references",
    )
    for env in (
        [{"name": f"E{i}", "value": "x"} for i in range(513)],
        [{"name": "E", "value": "x" * 65537}],
    ):
        value = sized()
        value["spec"]["template"]["spec"]["containers"][0]["env"] = env
        await reader.refuses(api.create(jobs, value, "default"), "a large environment")
    for kind, key in (("labels", "fireflyer.dev/leader"), ("annotations", "x.fireflyer.dev/y")):
        value = sized()
        value["spec"]["template"]["metadata"] = {kind: {"team": "vision", key: "true"}}
        case_name = f"a reserved {kind.removesuffix('s')} of the pods"
        await reader.refuses(api.create(jobs, value, "default"), case_name)
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 20000, "mine": "y"}
    env = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    value = sized(annotations=applied)
    value["spec"]["template"]["spec"]["containers"][0]["env"] = env
    await api.create(jobs, value, "default")
    value["metadata"]["annotations"] = {next(iter(applied)): "x" * 65537}
    text = {"metadata": {"annotations": value["metadata"]["annotations"]}}
    large = "a large copy of the manifest"
    await reader.refuses(api.merge(jobs, name, text, "default"), large)
    await delete_object(api, "flyerjobs", name)
    value["metadata"]["name"] = f"{name}-large"
    await reader.refuses(api.create(jobs, value, "default"), large)
