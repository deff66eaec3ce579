"""Admission policies that limit what one FlyerJob may request from shared services.

- `flyerjob-limits`: `spec.preemption` is within the administrator's caps, FlyerTopology
  `spec.limits`. The engine applies the same caps to jobs that were there before.
- `flyerjob-size`: annotations, labels, finalizers, owner references and environment of one job are
  small: the operator keeps metadata of every job in memory, and each pod repeats the template. How
  many jobs a namespace may have is a ResourceQuota's (`count/flyerjobs.fireflyer.dev`).
- `flyerjob-queue`: a queue that a FlyerQuota limits by name needs the verb `use` on the resource
  `flyerqueues` with that name, in the job's namespace: what runs in it counts against all that use
  it. Other queues, and the default one, are open.
- `flyerjob-template`: labels and annotations of the pod template have no key of our domain. Such
  keys select pods for the operator, the gateway, network policies and the injection webhook.
"""

from __future__ import annotations

from typing import Any, Final

from flyer.api import names
from flyer.api.flyerjob import DEFAULT_QUEUE
from flyer.api.podpolicies import policy

__all__ = ["limit_policies"]

# The caps that hold where the FlyerTopology names none, as in its schema.
CAPS: Final = {"checkpointGracePeriod": "15m", "maxCheckpointGracePeriod": "1h", "minRuntime": "2h"}
DEFAULTS: Final = {
    "checkpointGracePeriod": "60s",
    "maxCheckpointGracePeriod": "10m",
    "minRuntime": "15m",
}
ANNOTATIONS_BYTES_MAX: Final = 16 * 1024
KUBECTL_BYTES_MAX: Final = 64 * 1024
"""Maximum bytes of the copy of the manifest that `kubectl apply` keeps in an annotation."""
LABELS_MAX: Final = 64
REFERENCES_BYTES_MAX: Final = 8 * 1024
"""Maximum bytes of all finalizers and owner references: Kubernetes does not limit them."""
_QUEUES: Final = "flyerqueues"
ENV_MAX: Final = 512
ENV_BYTES_MAX: Final = 64 * 1024
"""Maximum bytes of all values of one container: ten times the size that frameworks set."""


def limit_policies() -> list[dict[str, Any]]:
    """The policies."""
    return [_limits(), _size(), _queue(), _template()]


def _policy(name: str, **spec: Any) -> dict[str, Any]:
    operations = ["CREATE", "UPDATE"]
    return policy(name, names.GROUP, names.PLURAL_JOBS, operations, "*", **spec)


def _limits() -> dict[str, Any]:
    priority = "dyn(object).spec.?priority.orValue('normal')"
    validations = []
    for field, cap in CAPS.items():
        request = f"dyn(object).spec.?preemption.?{field}.orValue('{DEFAULTS[field]}')"
        before = f"dyn(oldObject).spec.?preemption.?{field}.orValue('{DEFAULTS[field]}')"
        lower = (
            f"variables.own.filter(one, has(one.{field})).map(one, string(one.{field}))"
            f" + [string(variables.limits[?'{field}'].orValue('{cap}'))]"
        )
        validations.append(
            {
                "expression": f"(request.operation == 'UPDATE' && {request} == {before}"
                f" && {priority} == dyn(oldObject).spec.?priority.orValue('normal'))"
                f" || duration({request}) <= duration(({lower})[0])",
                "messageExpression": f"'spec.preemption.{field}: ' + string({request}) + ' is above"
                f" the cap ' + ({lower})[0] + ' for priority ' + string({priority})"
                " + ': ask for less; the caps are spec.limits of FlyerTopology '"
                " + params.metadata.name",
            }
        )
    return _policy(
        "flyerjob-limits",
        paramKind={"apiVersion": names.API_VERSION, "kind": names.KIND_TOPOLOGY},
        variables=[
            {
                "name": "limits",
                "expression": "dyn(params).?spec.?limits.orValue({})",
            },
            {
                "name": "own",
                "expression": "variables.limits[?'priorities'].orValue([])"
                f".filter(one, one.priority == {priority})",
            },
        ],
        validations=validations,
    )


def _size() -> dict[str, Any]:
    annotations = "object.metadata.?annotations.orValue({})"
    kubectls = "k.startsWith('kubectl.kubernetes.io/')"
    own = f"{annotations}.map(k, {kubectls} ? 0 : size({annotations}[k])).sum()"
    # Not kept in the operator's memory, but the API server sends it to every watch.
    kubectl = f"{annotations}.map(k, {kubectls} ? size({annotations}[k]) : 0).sum()"
    same = f"oldObject.metadata.?annotations.orValue({{}}) == {annotations}"
    references = _references_bytes("object")
    # The CRD leaves initContainers open: any JSON may be there until the template is checked.
    spec = "dyn(object).spec.?template.?spec"
    first = f"{spec}.?initContainers.orValue([])"
    containers = (
        f"({spec}.?containers.orValue([]) + (type({first}) == list ? dyn({first}) : []))"
        ".filter(c, type(c) == map)"
    )
    entries = "c.?env.orValue([])"
    env = f"(type({entries}) == list ? dyn({entries}) : [])"
    value = "e.?value.orValue('')"
    bytes_of = f"type(e) == map && type({value}) == string ? size(string({value})) : 0"
    return _policy(
        "flyerjob-size",
        variables=[
            {"name": "annotations", "expression": own},
            {"name": "kubectl", "expression": kubectl},
            {"name": "labels", "expression": "object.metadata.?labels.orValue({}).size()"},
            {"name": "references", "expression": references},
            {"name": "containers", "expression": containers},
        ],
        validations=[
            {
                "expression": f"variables.annotations <= {ANNOTATIONS_BYTES_MAX}",
                "messageExpression": "'metadata.annotations: ' + string(variables.annotations) + '"
                f" bytes, at most {ANNOTATIONS_BYTES_MAX}: keep large texts in a ConfigMap'",
            },
            {
                # A job that was stored before can still be suspended and stopped.
                "expression": f"variables.kubectl <= {KUBECTL_BYTES_MAX}"
                f" || (request.operation == 'UPDATE' && {same})",
                "messageExpression": "'metadata.annotations: kubectl keeps a copy of the manifest"
                f" of ' + string(variables.kubectl) + ' bytes, at most {KUBECTL_BYTES_MAX}: use"
                " kubectl apply --server-side, which keeps none'",
            },
            {
                "expression": f"variables.labels <= {LABELS_MAX}",
                "messageExpression": "'metadata.labels: ' + string(variables.labels) + ' labels, at"
                f" most {LABELS_MAX}: remove some'",
            },
            {
                # Of a job that was stored before, they can still be removed one by one.
                "expression": f"variables.references <= {REFERENCES_BYTES_MAX}"
                " || (request.operation == 'UPDATE'"
                f" && variables.references <= {_references_bytes('oldObject')})",
                "messageExpression": "'metadata.finalizers and metadata.ownerReferences: '"
                f" + string(variables.references) + ' bytes, at most {REFERENCES_BYTES_MAX}: remove"
                " some'",
            },
            {
                "expression": f"variables.containers.all(c, {env}.size() <= {ENV_MAX} &&"
                f" {env}.map(e, {bytes_of}).sum() <= {ENV_BYTES_MAX})",
                "messageExpression": "'spec.template.spec.containers: env of a container has more"
                f" than {ENV_MAX} variables or {ENV_BYTES_MAX} bytes: mount a ConfigMap'",
            },
        ],
    )


def _references_bytes(job: str) -> str:
    metadata = f"dyn({job}).metadata"
    references = " + ".join(
        f"size(string(o.?{name}.orValue('')))" for name in ("apiVersion", "kind", "name", "uid")
    )
    return (
        f"({metadata}.?finalizers.orValue([]).map(f, size(string(f))).sum()"
        f" + {metadata}.?ownerReferences.orValue([]).map(o, {references}).sum())"
    )


def _queue() -> dict[str, Any]:
    """Asked for each FlyerQuota."""

    def queue(job: str) -> str:
        label = f"{job}.metadata.?labels[?'{names.QUEUE_LABEL}'].orValue('')"
        return f"({job}.spec.?queue.orValue('') != '' ? {job}.spec.?queue.orValue('') : {label})"

    return _policy(
        "flyerjob-queue",
        paramKind={"apiVersion": names.API_VERSION, "kind": names.KIND_QUOTA},
        variables=[{"name": "queue", "expression": queue("object")}],
        validations=[
            {
                "expression": "dyn(params).?spec.?queue.orValue('') != variables.queue"
                f" || variables.queue in ['', '{DEFAULT_QUEUE}']"
                f" || (request.operation == 'UPDATE' && variables.queue == {queue('oldObject')})"
                f" || authorizer.group('{names.GROUP}').resource('{_QUEUES}')"
                ".namespace(request.namespace).name(variables.queue).check('use').allowed()",
                "messageExpression": "'spec.queue: ' + variables.queue + ' is limited by"
                " FlyerQuota ' + params.metadata.name + ' and may not be used by '"
                " + request.userInfo.username + ': choose another queue, or ask for the verb use"
                f" on {_QUEUES}.{names.GROUP}/' + variables.queue",
                "reason": "Forbidden",
            }
        ],
    )


def _template() -> dict[str, Any]:
    variables, validations = [], []
    for kind in ("labels", "annotations"):
        entries = f"dyn(object).spec.?template.?metadata.?{kind}.orValue({{}})"
        before = f"dyn(oldObject).spec.?template.?metadata.?{kind}.orValue({{}})"
        own_keys = f"k.startsWith('{names.GROUP}/') || k.contains('.{names.GROUP}/')"
        variables.append({"name": kind, "expression": f"{entries}.filter(k, {own_keys})"})
        validations.append(
            {
                # A job that was stored before can still be suspended and stopped.
                "expression": f"variables.{kind}.size() == 0"
                f" || (request.operation == 'UPDATE' && {entries} == {before})",
                "messageExpression": f"'spec.template.metadata.{kind}[' +"
                f" string(variables.{kind}[0]) + ']: keys of {names.GROUP} are reserved for"
                " Fire-Flyer: remove it, or use another domain'",
            }
        )
    return _policy("flyerjob-template", variables=variables, validations=validations)
