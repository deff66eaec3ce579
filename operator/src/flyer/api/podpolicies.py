"""Admission policies for pods, and for changes by the operator's service account.

- `pod-labels`: only the operator's account may set the labels by which the operator, the gateway
  and network policies identify pods of jobs.
- `pod-dedicated-nodes`: pods that tolerate the taint of dedicated nodes, or are bound by
  `spec.nodeName`, need the verb `use` on the resource `flyernodes` named `dedicated`, either
  of the account that creates the pod or of the pod's own service account (a DaemonSet's pods are
  created by a controller). The controller's own permission does not count: it acts for any user.
- `pod-priority-classes`: pods with a PriorityClass of the chart (`flyer-*`), or with a priority at
  which kube-scheduler preempts the suite's own pods, need the verb `use` on that PriorityClass, of
  the same accounts, in the pod's namespace. Outside its own namespace the operator may use only
  `flyer-job`, so that a job's template cannot name another class.
- `pod-of-job`: the controller reference of a FlyerJob's pod is immutable, and a pod whose processes
  may run is deleted only with a grace period. Otherwise processes could remain, unknown to the
  operator, on a node that it assigns to the next job.
- `pod-eviction`: evictions, which `pod-of-job` does not cover, require a grace period, too.
- `operator-pods`: the operator creates, changes and deletes only pods of FlyerJobs, and none in the
  system namespaces. In its own namespace it changes labels of operator pods to mark the leader.
- `operator-webhook`: the operator may change only the caBundle of the webhook configuration.
- `operator-namespaces`: created by the chart if `watchNamespaces` limits the operator.
"""

from __future__ import annotations

from typing import Any, Final

from flyer.api import names

__all__ = ["CLUSTER_NAMESPACE", "CRITICAL_PRIORITY", "RESERVED_LABELS", "pod_policies"]

RESERVED_LABELS: Final = tuple(
    f"{names.GROUP}/{name}" for name in ("job", "history", "attempt", "node-rank", "leader")
)
CLUSTER_NAMESPACE: Final = "kube-system"
# The lowest priority of a service whose loss stops other tenants: the chart's class flyer-storage.
CRITICAL_PRIORITY: Final = 800_000_000
_DEDICATED: Final = f"{names.GROUP}/dedicated"
_NODES: Final = "flyernodes"
_WEBHOOK: Final = "flyer-injection"
# All fields of a webhook except clientConfig, which contains the caBundle.
_WEBHOOK_FIELDS: Final = (
    "rules", "failurePolicy", "matchPolicy", "namespaceSelector", "objectSelector", "sideEffects",
    "timeoutSeconds", "admissionReviewVersions", "reinvocationPolicy", "matchConditions",
)  # fmt: skip


_MAY_DEDICATE: Final = (
    f"group('{names.GROUP}').resource('{_NODES}').name('dedicated').check('use').allowed()"
)
# CEL: whether the owner reference `o` is that of a FlyerJob that controls the pod.
_CONTROLS: Final = (
    f"o.?controller.orValue(false) && o.kind == '{names.KIND_JOB}'"
    f" && o.apiVersion.startsWith('{names.GROUP}/')"
)


def pod_policies(operator: str, namespace: str) -> list[dict[str, Any]]:
    """The policies. `operator` is a CEL text with the account's name, `namespace` its namespace."""
    return [
        _labels(operator),
        _dedicated(operator),
        _priority_classes(),
        _job_pods(operator),
        _evictions(),
        _operators_pods(operator, namespace),
        _operators_webhook(operator),
    ]


def policy(
    name: str,
    group: str,
    resource: str,
    operations: list[str],
    api_version: str = "v1",
    **spec: Any,
) -> dict[str, Any]:
    """A policy for operations on one resource."""
    rule = {
        "apiGroups": [group],
        "apiVersions": [api_version],
        "operations": operations,
        "resources": [resource],
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": f"{name}.{names.GROUP}"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            **spec,
        },
    }


def _labels(operator: str) -> dict[str, Any]:
    listed = "[" + ", ".join(f"'{label}'" for label in RESERVED_LABELS) + "]"
    new = "object.metadata.?labels.orValue({})"
    old = "oldObject.metadata.?labels.orValue({})"
    return policy(
        "pod-labels", "", "pods", ["CREATE", "UPDATE"],
        matchConditions=[
            {"name": "others", "expression": f"request.userInfo.username != {operator}"},
            {
                "name": "labelled",
                "expression": f"{listed}.exists(l, l in {new}"
                f" || (request.operation == 'UPDATE' && l in {old}))",
            },
        ],
        variables=[
            {
                "name": "changed",
                "expression": f"request.operation == 'CREATE' ? {listed}.filter(l, l in {new})"
                f" : {listed}.filter(l, {new}[?l] != {old}[?l])",
            },
        ],
        validations=[
            {
                "expression": "variables.changed.size() == 0",
                "messageExpression": "'metadata.labels[' + variables.changed[0] + ']: '"
                " + request.userInfo.username + ' may not set, change or remove it: it marks pods"
                " that the operator makes for a FlyerJob; leave it out'",
                "reason": "Forbidden",
            }
        ],
    )  # fmt: skip


def _dedicated(operator: str) -> dict[str, Any]:
    """A toleration without an effect, or with NoSchedule, allows a pod on the nodes."""
    tolerates = (
        "dyn(object).spec.?tolerations.orValue([]).exists(t,"
        f" (t.?key.orValue('') == '{_DEDICATED}'"
        " || (t.?key.orValue('') == '' && t.?operator.orValue('Equal') == 'Exists'))"
        " && t.?effect.orValue('') in ['', 'NoSchedule'])"
    )
    before = tolerates.replace("dyn(object)", "dyn(oldObject)")
    named = "dyn(object).spec.?nodeName.orValue('') != ''"
    account = "dyn(object).spec.?serviceAccountName.orValue('default')"
    return policy(
        "pod-dedicated-nodes", "", "pods", ["CREATE", "UPDATE"],
        matchConditions=[
            # Kubelets create mirror pods for static pods of their node.
            {
                "name": "others",
                "expression": f"request.userInfo.username != {operator}"
                " && !('system:nodes' in request.userInfo.?groups.orValue([]))",
            },
            {
                "name": "asks",
                "expression": f"request.operation == 'CREATE' ? ({tolerates} || {named})"
                f" : ({tolerates} && !({before}))",
            },
        ],
        variables=[
            {"name": "account", "expression": account},
            {
                "name": "what",
                "expression": f"{tolerates} ? 'spec.tolerations: the taint {_DEDICATED}'"
                " : 'spec.nodeName: selecting a node'",
            },
        ],
        validations=[
            {
                "expression": "(!request.userInfo.username.startsWith("
                f"'system:serviceaccount:{CLUSTER_NAMESPACE}:') && authorizer.{_MAY_DEDICATE})"
                " || authorizer.serviceAccount(request.namespace, variables.account)"
                f".{_MAY_DEDICATE}",
                "messageExpression": "variables.what + ' is not permitted for '"
                " + request.userInfo.username"
                " + ' and service account ' + request.namespace + '/' + variables.account"
                f" + ': leave it out, submit a FlyerJob, or ask for the verb use on {_NODES}."
                f"{names.GROUP}/dedicated'",
                "reason": "Forbidden",
            }
        ],
    )  # fmt: skip


def _priority_classes() -> dict[str, Any]:
    """The API server has already resolved the class: `spec.priority` is its value."""
    pod = "dyn(object).spec"
    check = "group('scheduling.k8s.io').resource('priorityclasses')"
    check += ".namespace(request.namespace).name(variables.name).check('use').allowed()"
    return policy(
        "pod-priority-classes", "", "pods", ["CREATE"],
        matchConditions=[
            {
                "name": "others",
                "expression": "!('system:nodes' in request.userInfo.?groups.orValue([]))",
            },
            {
                "name": "asks",
                "expression": f"{pod}.?priority.orValue(0) >= {CRITICAL_PRIORITY}"
                f" || {pod}.?priorityClassName.orValue('').startsWith('flyer-')",
            },
        ],
        variables=[
            {"name": "account", "expression": f"{pod}.?serviceAccountName.orValue('default')"},
            {"name": "name", "expression": f"{pod}.?priorityClassName.orValue('')"},
        ],
        validations=[
            {
                "expression": "(!request.userInfo.username.startsWith("
                f"'system:serviceaccount:{CLUSTER_NAMESPACE}:') && authorizer.{check})"
                " || authorizer.serviceAccount(request.namespace, variables.account)"
                f".{check}",
                "messageExpression": "'spec.priorityClassName: ' + variables.name"
                " + ' is not permitted for ' + request.userInfo.username"
                " + ' and service account ' + request.namespace + '/'"
                " + variables.account + ': leave it out, or ask for the verb use on"
                " priorityclasses.scheduling.k8s.io/' + variables.name",
                "reason": "Forbidden",
            }
        ],
    )  # fmt: skip


def _job_pods(operator: str) -> dict[str, Any]:
    def owners(pod: str) -> str:
        return f"{pod}.metadata.?ownerReferences.orValue([]).filter(o, {_CONTROLS})"

    return policy(
        "pod-of-job", "", "pods", ["UPDATE", "DELETE"],
        matchConditions=[
            # Kubelets delete without a grace period once all processes have ended.
            {
                "name": "others",
                "expression": f"request.userInfo.username != {operator}"
                " && !('system:nodes' in request.userInfo.?groups.orValue([]))",
            },
            {"name": "owned", "expression": f"{owners('oldObject')}.size() > 0"},
        ],
        variables=[
            {
                "name": "runs",
                "expression": "oldObject.spec.?nodeName.orValue('') != ''"
                " && !(oldObject.?status.?phase.orValue('') in ['Succeeded', 'Failed'])",
            },
            {
                # As the API server determines it: the request's grace period, or else the pod's.
                "name": "grace",
                "expression": "dyn(request).?options.?gracePeriodSeconds.orValue("
                "dyn(oldObject).spec.?terminationGracePeriodSeconds.orValue(30))",
            },
        ],
        validations=[
            {
                # Also for the garbage collector, which would orphan running pods.
                "expression": "request.operation == 'DELETE'"
                f" || {owners('object')}.map(o, o.uid) == {owners('oldObject')}.map(o, o.uid)",
                "messageExpression": "'metadata.ownerReferences: pod ' + oldObject.metadata.name"
                " + ' belongs to its FlyerJob while it exists, ' + request.userInfo.username"
                " + ' may not change that: delete the pod, or stop the job'",
                "reason": "Forbidden",
            },
            {
                "expression": "request.operation != 'DELETE' || !variables.runs"
                " || variables.grace != 0"
                # Controllers of Kubernetes may force it on nodes that are out of service.
                f" || authorizer.{_MAY_DEDICATE}",
                "messageExpression": "'gracePeriodSeconds: pod ' + oldObject.metadata.name"
                " + ' may still run and cannot be deleted by force by ' + request.userInfo.username"
                " + ': use a grace period of 1 or more (kubectl delete --now), or ask for the verb"
                f" use on {_NODES}.{names.GROUP}/dedicated'",
                "reason": "Forbidden",
            },
        ],
    )  # fmt: skip


def _evictions() -> dict[str, Any]:
    return policy(
        "pod-eviction", "", "pods/eviction", ["CREATE"],
        validations=[
            {
                "expression": "object.?deleteOptions.?gracePeriodSeconds.orValue(1) != 0"
                f" || authorizer.{_MAY_DEDICATE}",
                "messageExpression": "'deleteOptions.gracePeriodSeconds: ' + request.name"
                " + ' may still run and cannot be evicted by force by ' + request.userInfo.username"
                " + ': use a grace period of 1 or more, or ask for the verb use on"
                f" {_NODES}.{names.GROUP}/dedicated'",
                "reason": "Forbidden",
            },
        ],
    )  # fmt: skip


def _operators_pods(operator: str, namespace: str) -> dict[str, Any]:
    of_a_job = f"variables.pod.metadata.?ownerReferences.orValue([]).exists(o, {_CONTROLS})"
    return policy(
        "operator-pods", "", "pods", ["CREATE", "UPDATE", "DELETE"],
        matchConditions=[
            {"name": "operator", "expression": f"request.userInfo.username == {operator}"},
        ],
        variables=[
            {
                "name": "pod",
                "expression": "request.operation == 'DELETE' ? oldObject : object",
            },
            {"name": "owned", "expression": of_a_job},
            {
                "name": "system",
                "expression": f"request.namespace in ['{CLUSTER_NAMESPACE}', '{namespace}']",
            },
        ],
        validations=[
            {
                "expression": "(variables.owned && !variables.system)"
                f" || (request.operation == 'UPDATE' && request.namespace == '{namespace}')",
                "messageExpression": "'pod ' + request.namespace + '/' + request.name + ': the"
                " operator may change only pods outside the system namespaces that a FlyerJob"
                " controls (metadata.ownerReferences)'",
                "reason": "Forbidden",
            }
        ],
    )  # fmt: skip


def _operators_webhook(operator: str) -> dict[str, Any]:
    same = " && ".join(f"w.?{field} == o.?{field}" for field in _WEBHOOK_FIELDS)
    return policy(
        "operator-webhook", "admissionregistration.k8s.io", "mutatingwebhookconfigurations",
        ["CREATE", "UPDATE", "DELETE"],
        matchConditions=[
            {"name": "operator", "expression": f"request.userInfo.username == {operator}"},
        ],
        validations=[
            {
                "expression": "request.operation == 'UPDATE'"
                f" && object.metadata.name == '{_WEBHOOK}'"
                " && object.?webhooks.orValue([]).size() == oldObject.?webhooks.orValue([]).size()"
                " && object.?webhooks.orValue([]).all(w, oldObject.?webhooks.orValue([]).exists(o,"
                f" w.name == o.name && {same}"
                " && w.clientConfig.?service == o.clientConfig.?service"
                " && w.clientConfig.?url == o.clientConfig.?url))",
                "messageExpression": "'MutatingWebhookConfiguration ' + request.name + ': the"
                f" operator changes clientConfig.caBundle in {_WEBHOOK} and nothing else'",
                "reason": "Forbidden",
            }
        ],
    )  # fmt: skip
