"""Refusals by the admission policies: every validation, with its message.

`REFUSALS[key]` has the policy, the error and the whole message of a case in `test_policies`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import pytest
from flyer.kube.apiserver.errors import ApiError, ForbiddenError, InvalidError

from .real_api import OPERATOR
from .rule_cases import CASES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator


class Refusal(NamedTuple):
    policy: str
    error: type[ApiError]
    text: str


def _status(more: str = "") -> Refusal:
    text = f"status: anna may not write it: only {OPERATOR} does; change spec instead{more}"
    return Refusal("flyerjob-status", ForbiddenError, text)


def _identity(text: str) -> Refusal:
    return Refusal("flyerjob-identity", InvalidError, f"metadata.annotations[fireflyer.dev/{text}")


def _priority(level: str) -> Refusal:
    text = (
        f"spec.priority: {level} may not be used by clara: choose normal, lower or auto, or ask "
        f"for the verb use on flyerpriorities.fireflyer.dev/{level}"
    )
    return Refusal("flyerjob-priority", ForbiddenError, text)


def _own_node(text: str) -> Refusal:
    return Refusal("nodehealth-own-node", ForbiddenError, text)


AGENT = "system:serviceaccount:fireflyer-system:flyer-node"
WATCHED = "may not write it: only the agent on that node does; to keep work away set spec.drain"
OWN = "may not write it: an agent writes the object of its own node"

ANNAS = (
    "is not permitted for anna and service account default/default: leave it out, submit a "
    "FlyerJob, or ask for the verb use on flyernodes.fireflyer.dev/dedicated"
)


def _class(name: str, user: str, account: str = "default") -> Refusal:
    text = (
        f"spec.priorityClassName: {name} is not permitted for {user} and service account "
        f"default/{account}: leave it out, or ask for the verb use on "
        f"priorityclasses.scheduling.k8s.io/{name}"
    )
    return Refusal("pod-priority-classes", ForbiddenError, text)


def _marked(label: str) -> Refusal:
    text = (
        f"metadata.labels[fireflyer.dev/{label}]: anna may not set, change or remove it: it marks "
        "pods that the operator makes for a FlyerJob; leave it out"
    )
    return Refusal("pod-labels", ForbiddenError, text)


def _leaves(user: str) -> Refusal:
    text = (
        f"metadata.ownerReferences: pod run belongs to its FlyerJob while it exists, {user} may "
        "not change that: delete the pod, or stop the job"
    )
    return Refusal("pod-of-job", ForbiddenError, text)


def _cap(field: str, requested: str, cap: str, priority: str = "normal") -> Refusal:
    text = (
        f"spec.preemption.{field}: {requested} is above the cap {cap} for priority {priority}: "
        "ask for less; the caps are spec.limits of FlyerTopology cluster"
    )
    return Refusal("flyerjob-limits", InvalidError, text)


def _reserved(field: str) -> Refusal:
    text = (
        f"spec.template.metadata.{field}: keys of fireflyer.dev are reserved for Fire-Flyer: "
        "remove it, or use another domain"
    )
    return Refusal("flyerjob-template", InvalidError, text)


def _operators(pod: str) -> Refusal:
    text = (
        f"pod {pod}: the operator may change only pods outside the system namespaces that a "
        "FlyerJob controls (metadata.ownerReferences)"
    )
    return Refusal("operator-pods", ForbiddenError, text)


REFUSALS = {
    "a pod of a job by anna": _marked("job"),
    "a pod that becomes a leader": _marked("leader"),
    "a pod that leaves its job": _leaves("anna"),
    "an orphaned pod": _leaves("system:serviceaccount:kube-system:generic-garbage-collector"),
    "a pod deleted by force": Refusal(
        "pod-of-job",
        ForbiddenError,
        "gracePeriodSeconds: pod run may still run and cannot be deleted by force by anna: use "
        "a grace period of 1 or more (kubectl delete --now), or ask for the verb use on "
        "flyernodes.fireflyer.dev/dedicated",
    ),
    "a pod without a grace": Refusal(
        "pod-of-job",
        ForbiddenError,
        "gracePeriodSeconds: pod no-grace may still run and cannot be deleted by force by anna: "
        "use a grace period of 1 or more (kubectl delete --now), or ask for the verb use on "
        "flyernodes.fireflyer.dev/dedicated",
    ),
    "a pod evicted by force": Refusal(
        "pod-eviction",
        ForbiddenError,
        "deleteOptions.gracePeriodSeconds: run may still run and cannot be evicted by force by "
        "anna: use a grace period of 1 or more, or ask for the verb use on "
        "flyernodes.fireflyer.dev/dedicated",
    ),
    "a toleration of dedicated nodes": Refusal(
        "pod-dedicated-nodes",
        ForbiddenError,
        f"spec.tolerations: the taint fireflyer.dev/dedicated {ANNAS}",
    ),
    "a node by its name": Refusal(
        "pod-dedicated-nodes", ForbiddenError, f"spec.nodeName: selecting a node {ANNAS}"
    ),
    "a priority class of the chart": _class("flyer-job", "anna"),
    "a priority class of the system": _class("system-node-critical", "anna"),
    "a priority class above the services": _class("test-urgent", "anna"),
    "a priority class of the chart in a template": _class("flyer-control", OPERATOR),
    "a priority class of the system in a template": _class("system-node-critical", OPERATOR),
    "a pod without a job by the operator": _operators("default/op"),
    "a pod of the system by the operator": _operators("kube-system/op"),
    "a webhook by the operator": Refusal(
        "operator-webhook",
        ForbiddenError,
        "MutatingWebhookConfiguration flyer-injection: the operator changes clientConfig.caBundle "
        "in flyer-injection and nothing else",
    ),
    "a long checkpointGracePeriod": _cap("checkpointGracePeriod", "16m", "15m"),
    "a long maxCheckpointGracePeriod": _cap("maxCheckpointGracePeriod", "87840h", "1h"),
    "a long minRuntime": _cap("minRuntime", "87840h", "2h"),
    "many annotations": Refusal(
        "flyerjob-size",
        InvalidError,
        "metadata.annotations: 20000 bytes, at most 16384: keep large texts in a ConfigMap",
    ),
    "a large copy of the manifest": Refusal(
        "flyerjob-size",
        InvalidError,
        "metadata.annotations: kubectl keeps a copy of the manifest of 65537 bytes, at most 65536: "
        "use kubectl apply --server-side, which keeps none",
    ),
    "many labels": Refusal(
        "flyerjob-size", InvalidError, "metadata.labels: 65 labels, at most 64: remove some"
    ),
    "many references": Refusal(
        "flyerjob-size",
        InvalidError,
        "metadata.finalizers and metadata.ownerReferences: 8232 bytes, at most 8192: remove some",
    ),
    "a large environment": Refusal(
        "flyerjob-size",
        InvalidError,
        "spec.template.spec.containers: env of a container has more than 512 variables or 65536 "
        "bytes: mount a ConfigMap",
    ),
    "a reserved label of the pods": _reserved("labels[fireflyer.dev/leader]"),
    "a reserved annotation of the pods": _reserved("annotations[x.fireflyer.dev/y]"),
    "a job's status": _status(" (suspend, stop, priority)"),
    "a quota's status": _status(),
    "the topology's status": _status(),
    "a leader that was replaced": Refusal(
        "flyerjob-epoch",
        InvalidError,
        "status.epoch: 3 is lower than 4, which FlyerTopology cluster has: a newer leader exists, "
        "stop writing and elect again",
    ),
    "created by another": _identity("user]: ben is not the requesting user anna: leave it out"),
    "taken over": _identity(
        "user]: ben cannot replace anna, the creator of the job: leave it unchanged"
    ),
    "asked by another": _identity(
        "changed-by]: ben is not the requesting user anna: leave it out, the API server sets it"
    ),
    "a level of others": _priority("extreme-high"),
    "a queue of others": Refusal(
        "flyerjob-queue",
        ForbiddenError,
        "spec.queue: research is limited by FlyerQuota of-research and may not be used by clara: "
        "choose another queue, or ask for the verb use on flyerqueues.fireflyer.dev/research",
    ),
    "a health by the agent of another node": _own_node(
        f"status of NodeHealth a1: {AGENT} on node b7 {WATCHED}"
    ),
    "a health by an agent of no node": _own_node(f"status of NodeHealth a1: {AGENT} {WATCHED}"),
    "a health by anna": _own_node(f"status of NodeHealth a1: anna {WATCHED}"),
    "an object by the agent of another node": _own_node(
        f"NodeHealth a1: the agent on node b7 {OWN}"
    ),
    "an object of another node": _own_node(f"NodeHealth a2: the agent on node b7 {OWN}"),
    "an object by an agent of no node": _own_node(
        f"NodeHealth a1: the agent on node unknown {OWN}"
    ),
    **{
        case.name: Refusal("flyerjob-fixed", InvalidError, case.message)
        for case in CASES
        if case.policy
    },
}


class RefusalChecker:
    """Checks that calls are refused, and records which refusals were checked."""

    def __init__(self) -> None:
        self.checked: set[str] = set()

    async def refuses(self, call: Awaitable[object], key: str) -> None:
        refusal = REFUSALS[key]
        policy = f"{refusal.policy}.fireflyer.dev"
        prefix = f"ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: "
        with pytest.raises(refusal.error) as raised:
            await call
        assert str(raised.value).endswith(prefix + refusal.text), str(raised.value)
        self.checked.add(key)


def pattern(expression: str) -> str:
    """Pattern of a messageExpression: literals as written, any text for computed parts."""
    return "".join(
        re.escape(term[1:-1]) if re.fullmatch(r"'[^']*'", term) else ".*"
        for term in _terms(expression)
    )


def _terms(expression: str) -> Iterator[str]:
    """Operands of the outermost `+`."""
    term, depth, quoted = "", 0, False
    for character in expression:
        quoted ^= character == "'"
        if not quoted:
            depth += (character in "([{") - (character in ")]}")
        if character == "+" and not depth and not quoted:
            yield term.strip()
            term = ""
        else:
            term += character
    yield term.strip()
