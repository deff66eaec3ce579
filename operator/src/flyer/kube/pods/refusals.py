"""Refusals: why a job's template cannot run as pods of a gang, with a remedy each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flyer.api.names import GROUP
from flyer.kube.pods.names import (
    DAEMON_CONTAINER,
    RUN_FOLDER,
    SIDECAR_CONTAINER,
    TOOLS_CONTAINER,
    TOOLS_FOLDER,
)
from flyer.kube.pods.shapes import misshapen, without_nulls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.api import FlyerJob
    from flyer.api.podtemplate import TemplateMetadata

__all__ = ["VOLUME_PREFIX", "PodsRefusedError", "refusals"]

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
    wrong = list(misshapen(spec, PLACE))
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
