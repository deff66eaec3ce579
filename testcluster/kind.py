"""Test cluster on kind, for machines with a container engine.

Selected automatically if `docker info` succeeds and kind is installed; FLYER_E2E_ENGINE=processes
or =kind overrides it. Tests that kill a node's processes need a cluster of processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from testcluster.errors import ClusterError

if TYPE_CHECKING:
    from testcluster.state import State

__all__ = ["create", "delete", "load_image", "usable"]

CONFIG = Path(__file__).with_name("kind.yaml")
READY_DEADLINE_S = 300


def usable() -> bool:
    """Whether kind creates whole clusters on this machine."""
    engine = os.environ.get("FLYER_E2E_ENGINE", "")
    if engine:
        return engine == "kind"
    if shutil.which("kind") is None or shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def create(state: State) -> None:
    """Makes the cluster, Ready on return; its kubeconfig is the state folder's."""
    arguments = [f"--config={CONFIG}", f"--kubeconfig={state.kubeconfig}"]
    _kind(state, "create", "cluster", *arguments, f"--wait={READY_DEADLINE_S}s")


def delete(state: State) -> None:
    """Removes the cluster."""
    _kind(state, "delete", "cluster", f"--kubeconfig={state.kubeconfig}")


def load_image(state: State, archive: Path) -> None:
    """Loads an image archive into all nodes."""
    _kind(state, "load", "image-archive", str(archive))


def _kind(state: State, *arguments: str) -> None:
    command = ["kind", *arguments, f"--name=fireflyer-{state.id}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")
