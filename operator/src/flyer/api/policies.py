"""Admission policies: checks that need the user or another object, which CRD rules do not see.

Data for the chart, which puts its own names in place of `SYSTEM_NAMESPACE`, `OPERATOR_ACCOUNT` and
`NODE_ACCOUNT`. All of it is CEL inside the API server and needs no running component of the suite.

- `flyerjob-status`: only the operator writes the status of FlyerJobs, FlyerQuotas and the topology.
  RBAC alone restricts the status of a job that another controller manages.
- `flyerjob-epoch`: a status is not written by a leader that was replaced. The leader writes its
  epoch to the FlyerTopology first, and lower ones are refused from then on, also in objects that
  the new leader has not touched. The API server reads the topology from a watch, so milliseconds
  may pass; the compare-and-swap of every write covers those. Jobs of other controllers have
  no epoch.
- `flyerjob-user` (mutating): stamps `fireflyer.dev/user` when a job is created, and
  `fireflyer.dev/changed-by` when a user changes its desired state.
- `flyerjob-identity`: a user cannot create or change a job in another user's name. The creator may
  name only its own account or none, also where nothing is stamped (Kubernetes before 1.36), and a
  stamp is not changed afterwards. Stamps are set first, as all mutations are.
- `flyerjob-fixed`: fields that determine the placement or the program of a job are immutable while
  it has nodes, and a stop cannot be withdrawn.
- `flyerjob-priority`: a level above normal needs the verb `use` on the resource
  `flyerpriorities` with that name, which RBAC gives to groups or users. FlyerQuotas bound the rest.
- `flyerjob-limits`, `-size`, `-queue`, `-template`: see `limitpolicies`; `pod-*` and `operator-*`:
  see `podpolicies`.
- `nodehealth-own-node`: an agent writes the NodeHealth of the node that it runs on, no other.
"""

from __future__ import annotations

from typing import Any

from pydantic.alias_generators import to_camel

from flyer.api import names
from flyer.api.flyerjob import WAITING
from flyer.api.lifecycle import WAIT
from flyer.api.limitpolicies import limit_policies
from flyer.api.mutability import FIXED_FIELDS
from flyer.api.podpolicies import pod_policies
from flyer.api.priorities import Priority

SYSTEM_NAMESPACE = "fireflyer-system"
OPERATOR_ACCOUNT = "flyer-operator"
NODE_ACCOUNT = "flyer-node"

_API = "admissionregistration.k8s.io/v1"
_PRIORITIES = "flyerpriorities"


def admission_policies() -> list[dict[str, Any]]:
    """Every policy, each followed by its binding."""
    policies: list[dict[str, Any]] = []
    operator = _account(OPERATOR_ACCOUNT)
    for policy, action in (
        (_status_writers(), ["Deny"]),
        (_epoch(), ["Deny"]),
        (_stamps(), None),
        (_identity(), ["Deny"]),
        (_fixed(), ["Deny"]),
        (_priority(), ["Deny"]),
        (_own_node(), ["Deny"]),
        *((policy, ["Deny"]) for policy in limit_policies()),
        *((policy, ["Deny"]) for policy in pod_policies(operator, SYSTEM_NAMESPACE)),
    ):
        policies += [policy, _binding(policy, action)]
    return policies


def _account(name: str) -> str:
    return f"'system:serviceaccount:{SYSTEM_NAMESPACE}:{name}'"


def _binding(policy: dict[str, Any], actions: list[str] | None) -> dict[str, Any]:
    name = policy["metadata"]["name"]
    spec: dict[str, Any] = {"policyName": name}
    if actions is not None:
        spec["validationActions"] = actions
    if "paramKind" in policy["spec"]:
        # Before the first leader writes it, the topology may be missing: nothing to compare with.
        reference: dict[str, Any] = {"name": names.TOPOLOGY_NAME}
        if policy["spec"]["paramKind"]["kind"] != names.KIND_TOPOLOGY:
            reference = {"selector": {}}  # every object of the kind
        spec["paramRef"] = {**reference, "parameterNotFoundAction": "Allow"}
    kind = f"{policy['kind']}Binding"
    return {"apiVersion": _API, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _matches(operations: list[str], *resources: str) -> dict[str, Any]:
    return {
        "resourceRules": [
            {
                "apiGroups": [names.GROUP],
                "apiVersions": ["*"],
                "operations": operations,
                "resources": list(resources),
            }
        ]
    }


def _validating(name: str, match: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": _API,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": f"{name}.{names.GROUP}"},
        "spec": {"failurePolicy": "Fail", "matchConstraints": match, **spec},
    }


# The object is the stored one except for its status, and `managedBy` never changes.
_OTHERS = f"dyn(object).?spec.?managedBy.orValue('{names.MANAGER}') != '{names.MANAGER}'"


def _status_writers() -> dict[str, Any]:
    return _validating(
        "flyerjob-status",
        _matches(
            ["UPDATE"],
            f"{names.PLURAL_JOBS}/status",
            f"{names.PLURAL_QUOTAS}/status",
            f"{names.PLURAL_TOPOLOGIES}/status",
        ),
        variables=[{"name": "operator", "expression": _account(OPERATOR_ACCOUNT)}],
        validations=[
            {
                "expression": f"request.userInfo.username == variables.operator || {_OTHERS}",
                "messageExpression": "'status: ' + request.userInfo.username + ' may not write it:"
                " only ' + variables.operator + ' does; change spec instead' +"
                f" (request.resource.resource == '{names.PLURAL_JOBS}'"
                " ? ' (suspend, stop, priority)' : '')",
                "reason": "Forbidden",
            }
        ],
    )


def _epoch() -> dict[str, Any]:
    return _validating(
        "flyerjob-epoch",
        _matches(["UPDATE"], f"{names.PLURAL_JOBS}/status"),
        paramKind={"apiVersion": names.API_VERSION, "kind": names.KIND_TOPOLOGY},
        variables=[
            {"name": "epoch", "expression": "object.?status.?epoch.orValue(0)"},
            {"name": "leading", "expression": "params.?status.?epoch.orValue(0)"},
        ],
        validations=[
            {
                "expression": f"variables.epoch >= variables.leading || {_OTHERS}",
                "messageExpression": "'status.epoch: ' + string(variables.epoch) + ' is lower than"
                " ' + string(variables.leading) + ', which FlyerTopology ' + params.metadata.name"
                " + ' has: a newer leader exists, stop writing and elect again'",
            }
        ],
    )


_ASKED = (
    "object.spec.?suspend.orValue(false) != oldObject.spec.?suspend.orValue(false)"
    " || object.spec.?stop.orValue('') != oldObject.spec.?stop.orValue('')"
    " || object.spec.?priority.orValue('') != oldObject.spec.?priority.orValue('')"
    f" || object.metadata.?annotations[?'{names.REQUEUE_ANNOTATION}'].orValue('')"
    f" != oldObject.metadata.?annotations[?'{names.REQUEUE_ANNOTATION}'].orValue('')"
)


def _stamps() -> dict[str, Any]:
    """One change of the object at most: each costs as much as applying a manifest."""
    created = "request.operation == 'CREATE'"
    stamped = "request.userInfo.username"
    return {
        "apiVersion": _API,
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": f"flyerjob-user.{names.GROUP}"},
        "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": _matches(["CREATE", "UPDATE"], names.PLURAL_JOBS),
            "matchConditions": [{"name": "asked", "expression": f"{created} || {_ASKED}"}],
            "mutations": [
                {
                    "patchType": "ApplyConfiguration",
                    "applyConfiguration": {
                        "expression": "Object{metadata: Object.metadata{annotations: "
                        f"{created} ? {{'{names.USER_ANNOTATION}': {stamped}}}"
                        f" : {{'{names.CHANGED_BY_ANNOTATION}': {stamped}}}}}}}"
                    },
                },
            ],
        },
    }


def _annotation(thing: str, key: str) -> str:
    return f"{thing}.metadata.?annotations[?'{key}'].orValue('')"


def _identity() -> dict[str, Any]:
    old, new = (_annotation(version, names.USER_ANNOTATION) for version in ("oldObject", "object"))
    changed_old, changed_new = (
        _annotation(version, names.CHANGED_BY_ANNOTATION) for version in ("oldObject", "object")
    )
    return _validating(
        "flyerjob-identity",
        _matches(["CREATE", "UPDATE"], names.PLURAL_JOBS),
        variables=[
            {"name": "created", "expression": "request.operation == 'CREATE'"},
            {
                "name": "changedBefore",
                "expression": f"variables.created ? '' : {changed_old}",
            },
        ],
        validations=[
            {
                "expression": f"!variables.created || {new} in ['', request.userInfo.username]",
                "messageExpression": f"'metadata.annotations[{names.USER_ANNOTATION}]: ' + {new}"
                " + ' is not the requesting user ' + request.userInfo.username"
                " + ': leave it out'",
            },
            {
                "expression": f"variables.created || {new} == {old}",
                "messageExpression": f"'metadata.annotations[{names.USER_ANNOTATION}]: ' + {new}"
                f" + ' cannot replace ' + {old} + ', the creator of the job: leave it unchanged'",
            },
            {
                "expression": f"{changed_new} == variables.changedBefore"
                f" || {changed_new} == request.userInfo.username",
                "messageExpression": f"'metadata.annotations[{names.CHANGED_BY_ANNOTATION}]: ' +"
                f" {changed_new} + ' is not the requesting user '"
                " + request.userInfo.username + ': leave it out, the API server sets it'",
            },
        ],
    )


def _fixed() -> dict[str, Any]:
    phase = f"oldObject.?status.?phase.orValue('{WAIT[0].value}')"
    expressions = {"template": "'this template'"}
    validations = [
        {
            "expression": f"variables.waits || object.spec.?{name} == oldObject.spec.?{name}",
            "messageExpression": f"'spec.{name}: ' + "
            + expressions.get(name, f"string(object.spec.?{name}.orValue('nothing'))")
            + " + ' cannot replace what the job has while it is ' + variables.phase + ': suspend it"
            " first (spec.suspend: true) and change it once it is Suspended, or create another"
            " job'",
        }
        for name in map(to_camel, FIXED_FIELDS)
    ]
    lower = (
        "(has(object.spec.activeDeadline)"
        " && duration(object.spec.activeDeadline) <= duration(oldObject.spec.activeDeadline))"
    )
    validations.append(
        {
            # Other jobs rely on it: backfill may have placed the job on nodes reserved for them.
            "expression": f"variables.waits || !has(oldObject.spec.activeDeadline) || {lower}",
            "messageExpression": "'spec.activeDeadline: '"
            " + string(object.spec.?activeDeadline.orValue('nothing'))"
            " + ' is more than the ' + string(oldObject.spec.?activeDeadline.orValue('nothing'))"
            " + ' that the job has while it is ' + variables.phase + ': lower it, or suspend the"
            " job first (spec.suspend: true) and raise it once it is Suspended'",
        }
    )
    stop = "object.spec.?stop.orValue('nothing')"
    before = "oldObject.spec.?stop.orValue('nothing')"
    validations.append(
        {
            "expression": f"{before} == 'nothing' || {stop} == {before} || {stop} == 'Now'",
            "messageExpression": f"'spec.stop: ' + {stop} + ' cannot replace ' + {before}"
            " + ': a stop cannot be taken back, create another job'",
        }
    )
    return _validating(
        "flyerjob-fixed",
        _matches(["UPDATE"], names.PLURAL_JOBS),
        variables=[
            {"name": "phase", "expression": phase},
            {"name": "waits", "expression": f"variables.phase in {WAITING}"},
        ],
        validations=validations,
    )


def _priority() -> dict[str, Any]:
    free = [priority.value for priority in Priority if priority.level <= Priority.NORMAL.level]
    listed = "[" + ", ".join(f"'{priority}'" for priority in free) + "]"
    job_priority = f"object.spec.?priority.orValue('{Priority.NORMAL.value}')"
    before = f"oldObject.spec.?priority.orValue('{Priority.NORMAL.value}')"
    return _validating(
        "flyerjob-priority",
        _matches(["CREATE", "UPDATE"], names.PLURAL_JOBS),
        variables=[
            {"name": "priority", "expression": job_priority},
            {
                "name": "asked",
                "expression": f"request.operation == 'CREATE' || {job_priority} != {before}",
            },
        ],
        validations=[
            {
                "expression": f"!variables.asked || variables.priority in {listed}"
                f" || authorizer.group('{names.GROUP}').resource('{_PRIORITIES}')"
                ".namespace(request.namespace).name(variables.priority).check('use').allowed()",
                "messageExpression": "'spec.priority: ' + variables.priority + ' may not be"
                " used by ' + request.userInfo.username + ': choose normal, lower or auto, or ask"
                f" for the verb use on {_PRIORITIES}.{names.GROUP}/' + variables.priority",
                "reason": "Forbidden",
            }
        ],
    )


def _own_node() -> dict[str, Any]:
    return _validating(
        "nodehealth-own-node",
        _matches(
            ["CREATE", "UPDATE", "DELETE"],
            names.PLURAL_HEALTHS,
            f"{names.PLURAL_HEALTHS}/status",
        ),
        variables=[
            {"name": "agent", "expression": _account(NODE_ACCOUNT)},
            {
                "name": "node",
                "expression": "request.userInfo.?extra"
                "[?'authentication.kubernetes.io/node-name'][?0].orValue('')",
            },
            {
                "name": "own",
                "expression": "request.userInfo.username == variables.agent"
                " && variables.node == request.name",
            },
        ],
        validations=[
            {
                "expression": "!has(request.subResource) || request.subResource != 'status'"
                " || variables.own",
                "messageExpression": "'status of NodeHealth ' + request.name + ': '"
                " + request.userInfo.username + (variables.node == '' ? '' : ' on node ' +"
                " variables.node) + ' may not write it: only the agent on that node does; to keep"
                " work away set spec.drain'",
                "reason": "Forbidden",
            },
            {
                "expression": "request.userInfo.username != variables.agent || variables.own",
                "messageExpression": "'NodeHealth ' + request.name + ': the agent on node '"
                " + (variables.node == '' ? 'unknown' : variables.node)"
                " + ' may not write it: an agent writes the object of its own node'",
                "reason": "Forbidden",
            },
        ],
    )


__all__ = [
    "NODE_ACCOUNT",
    "OPERATOR_ACCOUNT",
    "SYSTEM_NAMESPACE",
    "admission_policies",
]
