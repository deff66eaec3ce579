"""Random pod templates for property tests, most of them nearly valid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random

__all__ = ["CONTAINER", "any_json", "any_template"]

TEXTS = (
    "", "x", "8", "64Gi", "1e9", "1e999", "node-a", "In", "Gt", "Always", "trainer", "ü", "a.b/c",
)  # fmt: skip
# Field names of pods, so that values reach the fields that the operator reads.
FIELDS = (
    "affinity", "allowPrivilegeEscalation", "args", "claimName", "claims", "command", "comand",
    "containers", "contianers", "cpu", "dnsPolicy", "effect", "env", "ephemeral",
    "fireflyer.dev/gpu", "hostNetwork", "hostname", "image", "imagePullSecrets", "initContainers",
    "key", "labels", "limits", "matchExpressions", "matchFields", "memory", "metadata",
    "mountPath", "name", "nodeAffinity", "nodeName", "nodeSelecter", "nodeSelector",
    "nodeSelectorTerms", "operator", "overhead", "persistentVolumeClaim", "podAffinity",
    "priorityClassName", "requests", "requiredDuringSchedulingIgnoredDuringExecution",
    "resourceClaims", "resources", "restartPolicy", "schedulerName", "schedulingGates", "spec",
    "subdomain", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints",
    "values", "volumeMounts", "volumes",
)  # fmt: skip
AFFINITY = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
CONTAINER = {"name": "trainer", "image": "i", "command": ["python", "train.py"]}


def any_json(random: Random, depth: int = 4) -> Any:
    """A JSON value, mostly small."""
    kind = random.randrange(10 if depth else 6)
    if kind < 6:
        return (
            None, random.random() < 0.5, random.randrange(-5, 2**40), random.random() * 1e6,
            random.choice(TEXTS), random.choice(TEXTS),
        )[kind]  # fmt: skip
    if kind < 8:
        return [any_json(random, depth - 1) for _ in range(random.randrange(4))]
    names = random.choices((*FIELDS, *TEXTS), k=random.randrange(4))
    return {name: any_json(random, depth - 1) for name in names}


def any_template(random: Random) -> Any:
    """A template, mostly a valid one with random JSON in some fields."""
    if random.random() < 0.1:
        return any_json(random)
    container: dict[str, Any] = dict(CONTAINER)
    spec: dict[str, Any] = {"containers": [container]}
    template: dict[str, Any] = {"spec": spec}
    for _ in range(random.randrange(1, 4)):
        place = random.choice([template, spec, spec, spec, container, container])
        place[random.choice(FIELDS)] = any_json(random)
    if random.random() < 0.3:
        inner = any_json(random)
        for name in reversed((*AFFINITY, "nodeSelectorTerms")):
            inner = {name: inner}
        spec.update(inner)
    if random.random() < 0.1:
        spec["initContainers"] = [dict(CONTAINER) | {random.choice(FIELDS): any_json(random)}]
    return template
