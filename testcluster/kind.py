"""Test cluster on kind, for machines with Docker or Podman.

Selected automatically if `docker info` succeeds; FLYER_E2E_ENGINE=processes or =kind overrides it.
Without Docker, kind uses Podman (root). Tests that cut a node's power or kill its processes need a
cluster of processes.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from images.kind_node import NODE_IMAGE, node_archive
from programs import binaries
from testcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from testcluster.nodes import NodeSpec
    from testcluster.state import State

__all__ = ["create", "delete", "load_image", "run", "usable"]

READY_DEADLINE_SECONDS = 300
COMMAND_SECONDS = 900.0
"""A command of kind or of the engine; creating six nodes takes two minutes."""
ENGINE_SECONDS = 10
PODMAN_SETTINGS = "containers.conf"
HARDWARE = "flyer-fake"
"""The folder of a node's simulated hardware below `var-lib`, in the node below /var/lib."""


def usable() -> bool:
    """Whether kind creates whole clusters on this machine."""
    if engine := os.environ.get("FLYER_E2E_ENGINE", ""):
        return engine == "kind"
    return _docker_runs()


def create(state: State, nodes: Sequence[NodeSpec]) -> None:
    """Creates the cluster, Ready on return; its kubeconfig is the state folder's."""
    print("cluster: building or loading the node image", flush=True)
    state.engine = "docker" if _docker_runs() else "podman"
    state.save()
    _prepare_engine(state)
    _run(state, state.engine, "load", "--input", str(node_archive()))
    config = state.folder / "kind.json"
    config.write_text(json.dumps(_config(state, nodes), indent=1))
    arguments = [f"--config={config}", f"--image={NODE_IMAGE}", f"--kubeconfig={state.kubeconfig}"]
    print(f"cluster: kind creates {1 + len(nodes)} nodes", flush=True)
    _kind(state, "create", "cluster", *arguments)
    _add_routes(state)
    deadline = f"--timeout={READY_DEADLINE_SECONDS}s"
    _kubectl(state, "wait", "--for=condition=Ready", "nodes", "--all", deadline)
    for workload in ("daemonset/kube-proxy", "deployment/coredns"):
        _kubectl(state, "rollout", "status", "--namespace=kube-system", workload, deadline)


def delete(state: State) -> None:
    """Removes the cluster."""
    _kind(state, "delete", "cluster", f"--kubeconfig={state.kubeconfig}")


def load_image(state: State, archive: Path) -> None:
    """Loads an image archive into all nodes."""
    _kind(state, "load", "image-archive", str(archive))


def run(state: State, node: str, *argv: str, deadline_s: float) -> str:
    """Runs a command in a node's container and returns its output."""
    command = (state.engine, "exec", _container(state, node), *argv)
    return _run(state, *command, deadline_s=deadline_s)


def _config(state: State, nodes: Sequence[NodeSpec]) -> dict[str, Any]:
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "kubeadmConfigPatches": [_patch("KubeletConfiguration", failCgroupV1=False)],
        "networking": {"disableDefaultCNI": True},  # containerd gives pods their addresses
        "nodes": [{"role": "control-plane"}, *(_worker(state, node) for node in nodes)],
    }


def _worker(state: State, node: NodeSpec) -> dict[str, Any]:
    hardware = state.folder / "nodes" / node.name / "var-lib" / HARDWARE
    hardware.mkdir(parents=True)
    registration = {"name": node.name, "taints": node.taints}
    return {
        "role": "worker",
        "labels": node.labels,
        "kubeadmConfigPatches": [_patch("JoinConfiguration", nodeRegistration=registration)],
        "extraMounts": [{"hostPath": str(hardware), "containerPath": f"/var/lib/{HARDWARE}"}],
    }


def _patch(kind: str, **fields: Any) -> str:
    return json.dumps({"kind": kind, **fields})


def _add_routes(state: State) -> None:
    """Routes the pods of each node through that node: no network add-on runs."""
    nodes = json.loads(_kubectl(state, "get", "nodes", "--output=json"))["items"]
    for source, target in itertools.permutations(nodes, 2):
        addresses = target["status"]["addresses"]
        address = next(entry["address"] for entry in addresses if entry["type"] == "InternalIP")
        route = ("ip", "route", "replace", target["spec"]["podCIDR"], "via", address)
        run(state, source["metadata"]["name"], *route, deadline_s=READY_DEADLINE_SECONDS)


def _container(state: State, node: str) -> str:
    """Kind numbers the containers of workers from the second one on."""
    if node not in state.nodes:
        return node
    number = state.nodes.index(node) + 1
    return f"{_name(state)}-worker{number if number > 1 else ''}"


def _kubectl(state: State, *arguments: str) -> str:
    kubectl = str(binaries.find("kubectl"))
    return _run(state, kubectl, f"--kubeconfig={state.kubeconfig}", *arguments)


def _docker_runs() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        command = ["docker", "info"]
        subprocess.run(command, capture_output=True, check=True, timeout=ENGINE_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return False
    return True


def _kind(state: State, *arguments: str) -> str:
    kind = str(binaries.require("kind")["kind"])
    return _run(state, kind, *arguments, f"--name={_name(state)}")


def _name(state: State) -> str:
    return f"fireflyer-{state.id}"


def _prepare_engine(state: State) -> None:
    """Settings for Podman: it raises limits, and chooses crun, where neither may work."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Podman lowers its own limit of processes to this one.
    processes = int(Path("/proc/sys/kernel/pid_max").read_text())
    if (hard := resource.getrlimit(resource.RLIMIT_NPROC)[1]) != resource.RLIM_INFINITY:
        processes = min(processes, hard)
    ulimits = [f"nofile={files}:{files}", f"nproc={processes}:{processes}"]
    text = f"[containers]\ndefault_ulimits = {json.dumps(ulimits)}\n"
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():  # version 1, or both
        text += '[engine]\nruntime = "runc"\n'
    (state.folder / PODMAN_SETTINGS).write_text(text)
    Path("/lib/modules").mkdir(exist_ok=True)  # kind mounts it


def _run(state: State, *command: str, deadline_s: float = COMMAND_SECONDS) -> str:
    environment = os.environ | {"KIND_EXPERIMENTAL_PROVIDER": state.engine}
    settings = state.folder / PODMAN_SETTINGS
    if settings.exists():  # not when an interrupted `down` is repeated
        environment["CONTAINERS_CONF"] = str(settings)
    try:
        result = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except FileNotFoundError:
        raise ClusterError(
            f"{command[0]} is not installed; kind needs Docker or Podman: apt install podman"
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(command)}: not finished within {deadline_s:g} s") from None
    if result.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
