"""Additions to a training pod, which never replace what the user wrote.

All functions change a pod's spec (JSON values) in place and are idempotent: an existing name is
left unchanged. The additions comply with Pod Security `restricted`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyer.kube.pods.names import (
    DAEMON_CONTAINER,
    DAEMON_SOCKET_PATH,
    RESOURCE_RDMA_HFREDUCE,
    RESOURCE_RDMA_NCCL,
    RUN_FOLDER,
    SIDECAR_CONTAINER,
    TOOLS_CONTAINER,
    TOOLS_FOLDER,
)
from flyer.kube.pods.settings import TOKEN_AUDIENCE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flyer.kube.pods.settings import PodSettings

__all__ = [
    "LIBRARY_FOLDER",
    "add_daemon",
    "add_environment",
    "add_mount",
    "add_named",
    "add_resource",
    "add_shared_memory",
    "add_sidecar",
    "add_tools",
    "add_traffic_classes",
]

LIBRARY_FOLDER = f"{TOOLS_FOLDER}/lib"
TOKEN_FOLDER = "/var/run/secrets/fireflyer.dev"  # noqa: S105  a folder
UNPRIVILEGED = 65532  # the images' user; any unprivileged one works
# A probe waits up to 10 s. Where many pods start together, starting the probe's process may take
# longer, and the kubelet restarts a sidecar whose startup probe fails. So it has ten minutes: the
# gang's start deadline bounds slow starts.
PROBE_SECONDS = 60
PROBE_FAILURES_MAX = 60
# This probe returns immediately, so ten minutes need more failures.
DAEMON_PROBE_FAILURES_MAX = 600

_TOOLS_VOLUME = "flyer-tools"
_RUN_VOLUME = "flyer-run"
# Holds the orders and reports of the largest gang, and a few failures.
_RUN_SIZE = "64Mi"
_TOKEN_VOLUME = "flyer-token"  # noqa: S105  a name
_SHARED_MEMORY_VOLUME = "flyer-shm"
_SHARED_MEMORY_FOLDER = "/dev/shm"  # noqa: S108  the kernel's own


def add_tools(spec: dict[str, Any], trainer: dict[str, Any], settings: PodSettings) -> None:
    """Add `flyer.job`, `hfreduce` and `haiscale` at /flyer/lib, filled by an init container."""
    add_named(spec, "volumes", {"name": _TOOLS_VOLUME, "emptyDir": {}})
    add_named(
        spec,
        "initContainers",
        {
            "name": TOOLS_CONTAINER,
            "image": settings.collectives_image,
            "imagePullPolicy": settings.image_pull_policy,
            "command": ["flyer-install", TOOLS_FOLDER],
            "resources": {"requests": {"cpu": "20m", "memory": "32Mi"}},
            "securityContext": _restricted(),
            "volumeMounts": [{"name": _TOOLS_VOLUME, "mountPath": TOOLS_FOLDER}],
        },
    )
    add_mount(trainer, _TOOLS_VOLUME, TOOLS_FOLDER, read_only=True)
    for name in settings.image_pull_secrets:
        add_named(spec, "imagePullSecrets", {"name": name})


def add_sidecar(spec: dict[str, Any], trainer: dict[str, Any], settings: PodSettings) -> None:
    """Add the native sidecar, the folder that it shares with the trainer, and its token."""
    _add_run_folder(spec, trainer)
    token = {
        "path": "token",
        "audience": TOKEN_AUDIENCE,
        "expirationSeconds": settings.token_seconds,
    }
    add_named(
        spec,
        "volumes",
        {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}},
    )
    probe = {"exec": {"command": ["flyer-sidecar", "probe"]}, "timeoutSeconds": PROBE_SECONDS}
    environment = {
        "FLYER_GATEWAY": settings.gateway_endpoint,
        "FLYER_GATEWAY_NAME": settings.gateway_name,
        "FLYER_GATEWAY_CA": settings.gateway_ca,
        "FLYER_GATEWAY_TOKEN_FILE": f"{TOKEN_FOLDER}/token",
        "FLYER_RUN_FOLDER": RUN_FOLDER,
    }
    container = {
        "name": SIDECAR_CONTAINER,
        "image": settings.controller_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["flyer-sidecar"],
        "restartPolicy": "Always",
        "env": [{"name": name, "value": value} for name, value in environment.items() if value],
        "resources": {
            "requests": dict(settings.sidecar_requests),
            "limits": dict(settings.sidecar_limits),
        },
        "securityContext": _restricted(),
        # The probe itself waits for the socket, so one run of it suffices.
        "startupProbe": {**probe, "periodSeconds": 1, "failureThreshold": PROBE_FAILURES_MAX},
        "volumeMounts": [
            {"name": _RUN_VOLUME, "mountPath": RUN_FOLDER},
            {"name": _TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True},
        ],
    }
    add_named(spec, "initContainers", container)


def add_daemon(spec: dict[str, Any], trainer: dict[str, Any], settings: PodSettings) -> None:
    """Add hfreduced as a separate native sidecar, so that its memory has its own limit.

    The kubelet supervises it. Its exit breaks the ranks' group with an error that names it, which
    the first failing rank reports to the job's status.
    """
    container = {
        "name": DAEMON_CONTAINER,
        "image": settings.collectives_image,
        "imagePullPolicy": settings.image_pull_policy,
        # The folder belongs to this pod alone, and the ranks run as their image's user.
        "command": ["hfreduced", "--socket", DAEMON_SOCKET_PATH, "--mode", "666"],
        "restartPolicy": "Always",
        "env": [{"name": "HFREDUCE_DUMP_DIR", "value": f"{RUN_FOLDER}/dumps"}],
        "resources": {"requests": dict(settings.daemon_requests)},
        "securityContext": _restricted(),
        # The socket file appears once the daemon listens.
        "startupProbe": {
            "exec": {"command": ["test", "-S", DAEMON_SOCKET_PATH]},
            "timeoutSeconds": PROBE_SECONDS,
            "periodSeconds": 1,
            "failureThreshold": DAEMON_PROBE_FAILURES_MAX,
        },
        "volumeMounts": [{"name": _RUN_VOLUME, "mountPath": RUN_FOLDER}],
    }
    _add_run_folder(spec, trainer)
    add_named(spec, "initContainers", container)
    add_environment(trainer, {"HFREDUCE_DAEMON": DAEMON_SOCKET_PATH})


def add_shared_memory(spec: dict[str, Any], trainer: dict[str, Any]) -> None:
    """Add a /dev/shm as large as the memory limit, for gradients exchanged within a node."""
    if any(
        mount.get("mountPath") == _SHARED_MEMORY_FOLDER for mount in _list(trainer, "volumeMounts")
    ):
        return
    add_named(spec, "volumes", {"name": _SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}})
    add_mount(trainer, _SHARED_MEMORY_VOLUME, _SHARED_MEMORY_FOLDER)


def add_traffic_classes(trainer: dict[str, Any], allocatable: Mapping[str, str]) -> None:
    """Request one unit of each collective traffic class that the node offers."""
    for name in (RESOURCE_RDMA_HFREDUCE, RESOURCE_RDMA_NCCL):
        if str(allocatable.get(name, "0")) != "0":
            add_resource(trainer, name, "1")


def add_environment(container: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Add variables that the user did not set, before the user's, which may refer to them."""
    own = _list(container, "env")
    names_present = {item.get("name") for item in own}
    added = [{"name": key, "value": value} for key, value in environment.items()]
    container["env"] = [entry for entry in added if entry["name"] not in names_present] + own


def add_resource(container: dict[str, Any], name: str, amount: str) -> None:
    """Add a request and limit of an extended resource, unless the container has either."""
    resources = container.setdefault("resources", {})
    kinds = [resources.setdefault(kind, {}) for kind in ("limits", "requests")]
    if all(name not in kind for kind in kinds):
        for kind in kinds:
            kind[name] = amount


def add_mount(
    container: dict[str, Any], volume: str, path: str, *, read_only: bool = False
) -> None:
    """Add a volume mount, unless the path is in use."""
    mounts = _list(container, "volumeMounts")
    if all(item.get("mountPath") != path for item in mounts):
        mount: dict[str, Any] = {"name": volume, "mountPath": path}
        if read_only:
            mount["readOnly"] = True
        container["volumeMounts"] = [*mounts, mount]


def add_named(spec: dict[str, Any], field: str, item: dict[str, Any]) -> None:
    """Append an item to a list of named items, unless its name exists."""
    items = _list(spec, field)
    if all(existing.get("name") != item["name"] for existing in items):
        spec[field] = [*items, item]


def _add_run_folder(spec: dict[str, Any], trainer: dict[str, Any]) -> None:
    """Add the folder that trainer and sidecars share."""
    # In memory, because suspensions pass through it and a node's disk may be busy with checkpoints.
    memory = {"medium": "Memory", "sizeLimit": _RUN_SIZE}
    add_named(spec, "volumes", {"name": _RUN_VOLUME, "emptyDir": memory})
    add_mount(trainer, _RUN_VOLUME, RUN_FOLDER)


def _list(body: dict[str, Any], field: str) -> list[dict[str, Any]]:
    return body.get(field) or []


def _restricted() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsGroup": UNPRIVILEGED,
        "runAsNonRoot": True,
        "runAsUser": UNPRIVILEGED,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
