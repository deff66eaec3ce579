"""Suggestions for misspelled or misplaced pod fields."""

from __future__ import annotations

import difflib
from typing import Final

__all__ = ["suggestion"]

# Fields of training pods, by the object that contains them.
_SPEC: Final = (
    "activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig",
    "dnsPolicy", "enableServiceLinks", "hostAliases", "hostIPC", "hostNetwork", "hostPID",
    "hostUsers", "hostname", "imagePullSecrets", "initContainers", "nodeSelector", "overhead",
    "preemptionPolicy", "priorityClassName", "restartPolicy", "runtimeClassName", "schedulerName",
    "securityContext", "serviceAccountName", "shareProcessNamespace", "subdomain",
    "terminationGracePeriodSeconds", "tolerations", "volumes",
)  # fmt: skip
_CONTAINER: Final = (
    "args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe",
    "name", "ports", "readinessProbe", "resources", "restartPolicy", "securityContext",
    "startupProbe", "stdin", "terminationMessagePath", "terminationMessagePolicy", "tty",
    "volumeDevices", "volumeMounts", "workingDir",
)  # fmt: skip
_RESOURCES: Final = ("claims", "limits", "requests")
_VOLUME: Final = (
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "hostPath", "image", "name", "nfs",
    "persistentVolumeClaim", "projected", "secret",
)  # fmt: skip
_MOUNT: Final = ("mountPath", "mountPropagation", "name", "readOnly", "subPath", "subPathExpr")


def suggestion(path: str) -> str:
    """A remedy for an unknown field such as `spec.containers[0].comand`; empty: none."""
    parent, _, name = path.rpartition(".")
    last = parent.rpartition(".")[2].partition("[")[0]
    among = {
        "spec": _SPEC, "containers": _CONTAINER, "initContainers": _CONTAINER,
        "resources": _RESOURCES, "volumes": _VOLUME, "volumeMounts": _MOUNT,
    }.get(last, ())  # fmt: skip
    homes = {
        "spec": _SPEC, "spec.containers[]": _CONTAINER, "spec.containers[].resources": _RESOURCES,
    }  # fmt: skip
    home = next((place for place, names in homes.items() if name in names), "")
    if home:
        return f"it belongs to {home}"
    matches = difflib.get_close_matches(name, among, 1, 0.7)
    return f"did you mean {matches[0]}?" if matches else ""
