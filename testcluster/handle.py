"""Handle of a running cluster for tests: kubectl, an API client and fault injection."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from images.build import archive
from images.contents import IMAGES
from images.pause import PAUSE_IMAGE
from programs import binaries
from testcluster import kind
from testcluster.errors import ClusterError
from testcluster.node import Node, load_image, run
from testcluster.nodes import NODES
from testcluster.processes import Process

if TYPE_CHECKING:
    from pathlib import Path

    from kubernetes.aio.client import ApiClient

    from testcluster.state import State

__all__ = ["Cluster", "KubectlError", "wait_for"]

T = TypeVar("T")
Manifest = Mapping[str, Any]

WAIT_S = 60.0


class KubectlError(ClusterError):
    """kubectl failed; `stderr` is its error output."""

    def __init__(self, arguments: Sequence[str], stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")
        self.stderr = stderr

    @property
    def unanswered(self) -> bool:
        """Whether the API server was overloaded and did not refuse the request itself."""
        no_time = ("Unable to connect to the server", "(ServiceUnavailable)")
        return any(words in self.stderr for words in no_time)


@dataclass(frozen=True)
class Cluster:
    """One cluster, light or whole."""

    state: State

    @property
    def kubeconfig(self) -> str:
        """The path of the administrator's kubeconfig."""
        return str(self.state.kubeconfig)

    def kubectl(self, *arguments: str, stdin: str = "", deadline_s: float = WAIT_S) -> str:
        """Returns kubectl's output; raises KubectlError when it fails."""
        result = subprocess.run(
            [str(binaries.find("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        if result.returncode != 0:
            raise KubectlError(arguments, result.stderr)
        return result.stdout

    def apply(self, *manifests: Manifest, namespace: str = "default") -> str:
        """`kubectl apply` of these objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
        return self.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=text)

    def get(
        self, kind: str, name: str = "", namespace: str = "default", *, selector: str = ""
    ) -> Any:
        """An object, or without a name the list's items, as parsed JSON."""
        names = [name] if name else [f"--selector={selector}"]
        document = json.loads(
            self.kubectl("get", kind, *names, f"--namespace={namespace}", "--output=json")
        )
        return document if name else document["items"]

    def wait_ready(
        self, *pods: str, namespace: str = "default", deadline_s: float = WAIT_S
    ) -> None:
        """Waits until these pods are Ready; an error includes their events."""
        names = [f"pod/{pod}" for pod in pods]
        try:
            self.kubectl(
                *("wait", "--for=condition=Ready", f"--namespace={namespace}", *names),
                f"--timeout={deadline_s:g}s",
                deadline_s=deadline_s + 10,
            )
        except KubectlError as error:
            events = self.kubectl("events", f"--namespace={namespace}")
            raise AssertionError(f"{error}\n{events}") from None

    async def client(self) -> ApiClient:
        """An asyncio API client as administrator: `async with await cluster.client() as api:`."""
        from kubernetes.aio import config

        api_client: ApiClient = await config.new_client_from_config(  # type: ignore[no-untyped-call]
            self.kubeconfig, persist_config=False
        )
        return api_client

    def load_images(self, *names: str) -> str:
        """Builds these images of the project (`images.contents`) and loads them into every node.

        Skips a node that has them already. Returns a digest of their contents.
        """
        images = {image.name: image for image in IMAGES}
        paths = {name: archive(images[name]) for name in names}
        if self.state.kind:
            for path in paths.values():
                kind.load_image(self.state, path)
        else:
            with ThreadPoolExecutor(len(self.state.nodes)) as threads:
                for name, path in paths.items():
                    loads = [threads.submit(self._load, n, name, path) for n in self.state.nodes]
                    for load in loads:
                        load.result()
        contents = " ".join(path.name for path in paths.values())
        return hashlib.sha256(contents.encode()).hexdigest()[:12]

    def _load(self, node: str, name: str, path: Path) -> None:
        loaded = self.state.folder / "nodes" / node / f"image-{name}"
        if loaded.exists() and loaded.read_text() == path.name:
            return
        load_image(self.state, node, path)
        loaded.write_text(path.name)

    def run_on(self, node: str, *argv: str, deadline_s: float = WAIT_S) -> str:
        """Runs a command in a node's namespaces and returns its output."""
        if self.state.kind:
            return kind.run(self.state, node, *argv, deadline_s=deadline_s)
        return run(self.state, node, *argv, deadline_s=deadline_s)

    def kill_container(self, pod: Manifest, container: str) -> None:
        """Kills a container as a crash would; its kubelet starts it again."""
        kinds = ("containerStatuses", "initContainerStatuses")  # sidecars are of the second
        statuses = [
            container_status for kind in kinds for container_status in pod["status"].get(kind, ())
        ]
        (match,) = (
            container_status
            for container_status in statuses
            if container_status["name"] == container
        )
        name = str(match["containerID"]).removeprefix("containerd://")
        words = ("ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", "--all", name)
        self.run_on(pod["spec"]["nodeName"], *words)

    def machine(self, name: str) -> Node:
        """A node, whose power can be cut."""
        self._of_processes()
        index = self.state.nodes.index(name)
        return Node(
            self.state, next(node for node in NODES if node.name == name), index, PAUSE_IMAGE
        )

    def process(self, name: str) -> Process:
        """One of the cluster's processes, to be killed and started again."""
        self._of_processes()
        return Process.load(self.state, name)

    def _of_processes(self) -> None:
        if self.state.kind:
            raise ClusterError("kind runs the nodes: this needs FLYER_E2E_ENGINE=processes")


def wait_for(description: str, probe: Callable[[], T | None], deadline_s: float = WAIT_S) -> T:
    """Calls `probe` until its result is true; raises AssertionError with `description` otherwise.

    A request that times out counts as a result that is not true.
    """
    deadline = time.monotonic() + deadline_s
    last: object = None
    while True:
        try:
            value = probe()
            if value:
                return value
            last = value
        except KubectlError as error:
            if not error.unanswered:
                raise
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {deadline_s:g} s: {description} (last: {last!r})")
        time.sleep(0.1)
