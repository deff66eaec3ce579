"""Refusals: why a job's template cannot run as pods of a gang, with a remedy each.

The JSON types of the fields that `build_pods` reads or extends are checked first, which makes it
total: for any JSON in a template, either these fields have their types, or the mismatch is
reported. The API server validates the whole pod (see `services.pods.templates`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flyer.api.names import GROUP
from flyer.kube.pods.names import (
    DAEMON_CONTAINER,
    RUN_FOLDER,
    SIDECAR_CONTAINER,
    TOOLS_CONTAINER,
    TOOLS_FOLDER,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.api import FlyerJob
    from flyer.api.podtemplate import TemplateMetadata

__all__ = ["VOLUME_PREFIX", "PodsRefusedError", "refusals", "without_nulls"]

VOLUME_PREFIX: Final = "flyer-"
PLACE: Final = "spec.template.spec"
_OUR_CONTAINERS: Final = (TOOLS_CONTAINER, SIDECAR_CONTAINER, DAEMON_CONTAINER)
_OUR_FOLDERS: Final = (TOOLS_FOLDER, RUN_FOLDER)


class PodsRefusedError(ValueError):
    """The job's template cannot become pods. `reasons`: field, value and remedy, one each."""

    def __init__(self, job: str, reasons: list[str]) -> None:
        super().__init__(f"{job}: {'; '.join(reasons)}")
        self.job = job
        self.reasons = reasons


def refusals(job: FlyerJob) -> Iterator[str]:
    """One line per reason, the field first. None: `build_pods` accepts the job."""
    template = job.spec.template
    trainer = template.trainer
    index = template.spec.containers.index(trainer)
    place = f"spec.template.spec.containers[{index}]"
    if not trainer.command:
        yield (
            f"{place}.command: missing: the image's entrypoint cannot be started once per "
            "rank, so set the command, for example [python, train.py]"
        )
    if not trainer.image:
        yield f"{place}.image: missing: set the image with your script's libraries"
    spec = template.to_object()["spec"]
    yield from _reserved_keys(template.metadata)
    wrong = list(_misshapen(spec, PLACE))
    yield from wrong
    if wrong:
        return  # the following checks rely on the types
    spec = without_nulls(spec)
    yield from _restart_policy(spec)
    yield from _deadline(spec)
    yield from _placement(spec)
    yield from _claims(spec)
    yield from _taken_names(spec)


def _reserved_keys(metadata: TemplateMetadata) -> Iterator[str]:
    """Keys reserved for the operator, the gateway, network policies and the webhook."""
    for kind, entries in (("labels", metadata.labels), ("annotations", metadata.annotations)):
        for key in entries:
            if key.startswith(f"{GROUP}/") or f".{GROUP}/" in key:
                yield (
                    f"spec.template.metadata.{kind}[{key}]: keys of {GROUP} are reserved for "
                    "Fire-Flyer: remove it, or use another domain"
                )


def _restart_policy(spec: dict[str, Any]) -> Iterator[str]:
    bodies = [(PLACE, spec)]
    bodies += [
        (f"{PLACE}.containers[{i}]", container) for i, container in enumerate(spec["containers"])
    ]
    for place, body in bodies:
        policy = body.get("restartPolicy", "Never")
        if policy != "Never":
            yield (
                f'{place}.restartPolicy: is "{policy}": a failed rank is not restarted alone, '
                "the whole gang is; remove it, or set Never"
            )
        if body.get("restartPolicyRules"):
            yield (
                f"{place}.restartPolicyRules: a failed container is not restarted alone, "
                "the whole gang is; remove them"
            )


def _deadline(spec: dict[str, Any]) -> Iterator[str]:
    if "activeDeadlineSeconds" in spec:
        yield (
            f"{PLACE}.activeDeadlineSeconds: ends pods of the gang before the job can save: remove "
            "it, and limit an attempt with spec.activeDeadline"
        )


def _placement(spec: dict[str, Any]) -> Iterator[str]:
    """Placement fields of single pods: a gang's nodes are chosen together."""
    if spec.get("nodeName"):
        yield (
            f'{PLACE}.nodeName: is "{spec["nodeName"]}": Fire-Flyer chooses the nodes of a gang, '
            "so that no node serves two jobs; remove it and set spec.nodeClass or spec.zone"
        )
    if spec.get("topologySpreadConstraints"):
        yield (
            f"{PLACE}.topologySpreadConstraints: a gang has one pod per node, placed by zone "
            "and leaf; remove them"
        )
    affinity = spec.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        if (affinity.get(kind) or {}).get("requiredDuringSchedulingIgnoredDuringExecution"):
            yield (
                f"{PLACE}.affinity.{kind}: not supported for gangs, which have exclusive nodes: "
                "remove it"
            )


def _claims(spec: dict[str, Any]) -> Iterator[str]:
    """Dynamic resource allocation needs the scheduler that binds the pod to allocate the claim."""
    containers = [*spec.get("containers", []), *spec.get("initContainers", [])]
    if spec.get("resourceClaims") or any(
        (container.get("resources") or {}).get("claims") for container in containers
    ):
        yield (
            f"{PLACE}.resourceClaims: dynamic resource allocation is not supported for gangs: "
            "request the devices as resources, such as fireflyer.dev/gpu"
        )


def _taken_names(spec: dict[str, Any]) -> Iterator[str]:
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(kind, [])):
            place = f"spec.template.spec.{kind}[{index}]"
            if container.get("name") in _OUR_CONTAINERS:
                yield f'{place}.name: "{container["name"]}" is added by Fire-Flyer: choose another'
            for mount in container.get("volumeMounts", []):
                path = str(mount.get("mountPath", "")).rstrip("/")
                if path in _OUR_FOLDERS:
                    yield (
                        f'{place}.volumeMounts: "{path}" is where Fire-Flyer keeps its own files: '
                        "mount your volume elsewhere"
                    )
    for index, volume in enumerate(spec.get("volumes", [])):
        if str(volume.get("name", "")).startswith(VOLUME_PREFIX):
            yield (
                f'spec.template.spec.volumes[{index}].name: "{volume["name"]}": names that start '
                f'with "{VOLUME_PREFIX}" are Fire-Flyer\'s: choose another'
            )


# -- types of fields -------------------------------------------------------------------------------

_DEPTH_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class _List:
    of: Any


@dataclass(frozen=True, slots=True)
class _Map:
    of: Any


@dataclass(frozen=True, slots=True)
class _Scalar:
    types: tuple[type, ...]
    name: str


_TEXT: Final = _Scalar((str,), "a string")
_FLAG: Final = _Scalar((bool,), "true or false")
_COUNT: Final = _Scalar((int,), "an integer")
_QUANTITY: Final = _Scalar((str, int, float), 'a quantity such as 8 or "64Gi"')
_ANY: Final = _Map(None)

_CONTAINER: Final[dict[str, Any]] = {
    "name": _TEXT,
    "image": _TEXT,
    "command": _List(_TEXT),
    "args": _List(_TEXT),
    "env": _List({"name": _TEXT}),
    "resources": {"limits": _Map(_QUANTITY), "requests": _Map(_QUANTITY), "claims": _List(_ANY)},
    "restartPolicy": _TEXT,
    "restartPolicyRules": _List(_ANY),
    "volumeMounts": _List({"name": _TEXT, "mountPath": _TEXT}),
}
_TERMS: Final = _List({
    "matchExpressions": _List({"key": _TEXT, "operator": _TEXT, "values": _List(_TEXT)}),
    "matchFields": _List({"key": _TEXT, "operator": _TEXT, "values": _List(_TEXT)}),
})  # fmt: skip
_POD_TERMS: Final = {"requiredDuringSchedulingIgnoredDuringExecution": _List(_ANY)}
_SPEC: Final[dict[str, Any]] = {
    "activeDeadlineSeconds": _COUNT,
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": _TERMS}
        },
        "podAffinity": _POD_TERMS,
        "podAntiAffinity": _POD_TERMS,
    },
    "containers": _List(_CONTAINER),
    "dnsPolicy": _TEXT,
    "hostNetwork": _FLAG,
    "hostname": _TEXT,
    "imagePullSecrets": _List({"name": _TEXT}),
    "initContainers": _List(_CONTAINER),
    "nodeName": _TEXT,
    "nodeSelector": _Map(_TEXT),
    "overhead": _Map(_QUANTITY),
    "priorityClassName": _TEXT,
    "resourceClaims": _List(_ANY),
    "resources": {"limits": _Map(_QUANTITY), "requests": _Map(_QUANTITY)},
    "restartPolicy": _TEXT,
    "schedulerName": _TEXT,
    "schedulingGates": _List({"name": _TEXT}),
    "subdomain": _TEXT,
    "terminationGracePeriodSeconds": _COUNT,
    "tolerations": _List({"key": _TEXT}),
    "topologySpreadConstraints": _List(_ANY),
    "volumes": _List({
        "name": _TEXT,
        "persistentVolumeClaim": {"claimName": _TEXT},
        "ephemeral": {"volumeClaimTemplate": {"spec": {"storageClassName": _TEXT}}},
    }),
}  # fmt: skip


def _misshapen(spec: Any, place: str) -> Iterator[str]:
    """One line for each field whose type differs from the API's, the field first."""
    yield from _check_type(spec, _SPEC, place)


def without_nulls(value: Any, depth: int = 0) -> Any:
    """A copy without null fields, as the API server reads it.

    Raises `RecursionError` for values nested deeper than any pod.
    """
    if depth > _DEPTH_MAX:
        raise RecursionError(f"nested deeper than {_DEPTH_MAX} levels")
    if isinstance(value, dict):
        return {
            key: without_nulls(member, depth + 1)
            for key, member in value.items()
            if member is not None
        }
    if isinstance(value, list):
        return [without_nulls(item, depth + 1) for item in value]
    return value


def _check_type(value: Any, expected: Any, place: str) -> Iterator[str]:
    if value is None and not place.endswith("]"):
        return
    match expected:
        case _Scalar():
            is_flag = isinstance(value, bool)
            if not isinstance(value, expected.types) or (is_flag and bool not in expected.types):
                yield _mismatch(place, value, expected.name)
        case _List() if isinstance(value, list):
            for index, item in enumerate(value):
                yield from _check_type(item, expected.of, f"{place}[{index}]")
        case _List():
            yield _mismatch(place, value, "a list")
        case _ if not isinstance(value, dict):
            yield _mismatch(place, value, "an object")
        case _Map():
            for key, item in value.items() if expected.of is not None else ():
                yield from _check_type(item, expected.of, f"{place}.{key}")
        case _:
            for key in [key for key in expected if key in value]:
                yield from _check_type(value[key], expected[key], f"{place}.{key}")


def _mismatch(place: str, value: Any, expected: str) -> str:
    return f"{place}: is {_kind(value)}, expected {expected}"


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return f'the text "{value[:40]}"'
        case _:
            return f"the number {value!r:.40}"
