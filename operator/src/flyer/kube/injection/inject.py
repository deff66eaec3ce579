"""Injection into a foreign training pod: the additions of a FlyerJob's pod, without the gateway.

Pure and idempotent. Without a launcher, no command is wrapped; without a topology, HFReduce treats
every host name as a node.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.pods.additions import (
    LIBRARY_FOLDER,
    add_daemon,
    add_environment,
    add_shared_memory,
    add_tools,
)
from flyer.kube.pods.names import (
    ANNOTATION_DEFAULT_CONTAINER,
    LABEL_INJECT,
    LABEL_JOB,
    RUN_FOLDER,
    TOOLS_FOLDER,
)
from flyer.kube.pods.refusals import VOLUME_PREFIX

if TYPE_CHECKING:
    from flyer.kube.pods.settings import PodSettings

__all__ = ["ANNOTATION_CONTAINER", "inject"]

# The label's values: the collectives, without or with hfreduced as a native sidecar.
COLLECTIVES, WITH_DAEMON = "true", "daemon"
ANNOTATION_CONTAINER: Final = "fireflyer.dev/inject-container"
# Kubernetes copies the node's zone to a pod's label when the pod is bound (from 1.35 on).
ZONE_LABEL: Final = "topology.kubernetes.io/zone"


def inject(pod: dict[str, Any], settings: PodSettings) -> tuple[dict[str, Any], list[str]]:
    """A copy of the pod with the additions, and warnings for the client that creates it."""
    metadata = pod.get("metadata") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if labels.get(LABEL_INJECT) not in (COLLECTIVES, WITH_DAEMON) or LABEL_JOB in labels:
        return pod, []
    changed = copy.deepcopy(pod)
    spec = changed["spec"]
    name = annotations.get(ANNOTATION_CONTAINER)
    trainer = _trainer(spec, name or annotations.get(ANNOTATION_DEFAULT_CONTAINER))
    if trainer is None:
        names = ", ".join(str(container.get("name")) for container in spec["containers"])
        return pod, [
            f'{ANNOTATION_CONTAINER}: the pod has no container "{name}" (containers: {names}); '
            "nothing was injected"
        ]
    warnings = _warnings(trainer, with_daemon=labels[LABEL_INJECT] == WITH_DAEMON)
    add_tools(spec, trainer, settings)
    add_shared_memory(spec, trainer)
    if labels[LABEL_INJECT] == WITH_DAEMON:
        add_daemon(spec, trainer, settings)
    add_environment(trainer, {"PYTHONPATH": LIBRARY_FOLDER})
    _add_field(trainer, "HFREDUCE_ADDRESS", "status.podIP")
    _add_field(trainer, "FLYER_ZONE", f"metadata.labels['{ZONE_LABEL}']")
    return changed, warnings


def _trainer(spec: dict[str, Any], name: str | None) -> dict[str, Any] | None:
    containers: list[dict[str, Any]] = spec["containers"]
    if name is None:
        return containers[0]
    return next((container for container in containers if container.get("name") == name), None)


def _warnings(trainer: dict[str, Any], *, with_daemon: bool) -> list[str]:
    warnings = []
    path = next(
        (variable for variable in trainer.get("env") or [] if variable.get("name") == "PYTHONPATH"),
        None,
    )
    if path is not None and LIBRARY_FOLDER not in str(path.get("value", "")):
        warnings.append(
            f"container {trainer.get('name')} sets PYTHONPATH, which is left alone: add "
            f"{LIBRARY_FOLDER} to it, or `import hfreduce` finds nothing"
        )
    own_folders = {TOOLS_FOLDER: "the collectives"}
    if with_daemon:
        own_folders[RUN_FOLDER] = "hfreduced's socket"
    for volume_mount in trainer.get("volumeMounts") or []:
        folder = volume_mount.get("mountPath")
        if folder in own_folders and not str(volume_mount.get("name", "")).startswith(
            VOLUME_PREFIX
        ):
            warnings.append(
                f"container {trainer.get('name')} mounts its own volume at {folder}, where "
                f"{own_folders[folder]} would be: mount it elsewhere"
            )
    return warnings


def _add_field(container: dict[str, Any], name: str, path: str) -> None:
    env = container.get("env") or []
    if all(variable.get("name") != name for variable in env):
        field = {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        container["env"] = [field, *env]
