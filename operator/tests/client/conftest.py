"""An in-memory API server with nodes, and `flyer` configured to use it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from flyer.client.kubernetes import AsyncKubeClient, KubeClient
from flyer.kube.apiserver import Access, Api
from flyer.sim import sample_job

from fakekube import ApiServer, node_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TIME = "2026-11-20T14:05:00.000Z"


class Cluster:
    """The server in a separate thread; tests access its store with `do`."""

    def __init__(self) -> None:
        self.server = ApiServer()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.call(self.server.start())

    def stop(self) -> None:
        self.call(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def do(self, work: Callable[[Any], Any]) -> Any:
        """Change or read the store in the server's thread."""

        async def inside() -> Any:
            return work(self.server.store)

        return self.call(inside())

    def add_nodes(self, *names: str, zone: str = "A") -> None:
        for name in names:
            self.do(lambda store, name=name: store.create("nodes", node_object(name, zone)))

    def add_namespace(self, name: str) -> None:
        value = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}

        def change(store: Any) -> None:
            if ("", name) not in store.table("namespaces", "").entries:
                store.create("namespaces", value)

        self.do(change)

    def add_job(self, name: str, nodes: int = 1, namespace: str = "default", **spec: Any) -> None:
        job = sample_job(name, nodes, **spec).to_object()
        job["metadata"]["namespace"] = namespace
        self.add_namespace(namespace)
        self.do(lambda store: store.create("flyerjobs", job, namespace))

    def set_status(self, name: str, status: dict[str, Any], namespace: str = "default") -> None:
        patch = {"status": status}
        self.do(
            lambda store: store.patch(
                "flyerjobs", name, patch, namespace, "status",
                kind="application/merge-patch+json",
            )
        )  # fmt: skip

    def job(self, name: str, namespace: str = "default") -> dict[str, Any]:
        return json.loads(json.dumps(self.do(lambda s: s.get("flyerjobs", name, namespace))))

    def add_pod(
        self,
        job: str,
        attempt: int,
        node_rank: int,
        log: str,
        *,
        phase: str = "Succeeded",
        namespace: str = "default",
        bound: bool = True,
    ) -> None:
        name = f"{job}-{attempt}-{node_rank}"
        labels = {
            "fireflyer.dev/job": job,
            "fireflyer.dev/attempt": str(attempt),
            "fireflyer.dev/node-rank": str(node_rank),
        }
        pod: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace, "labels": labels},
            "spec": {"containers": [{"name": "trainer"}]},
            "status": {"phase": phase},
        }
        if bound:
            pod["spec"]["nodeName"] = f"node-{node_rank}"

        def change(store: Any) -> None:
            store.create("pods", pod, namespace)
            store.patch(
                "pods", name, {"status": {"phase": phase}}, namespace, "status",
                kind="application/merge-patch+json",
            )  # fmt: skip

        self.do(change)
        self.server.logs[(namespace, name)] = log

    def end_pod(self, name: str, phase: str) -> None:
        ended = {"status": {"phase": phase}}
        self.do(
            lambda store: store.patch(
                "pods", name, ended, "default", "status", kind="application/merge-patch+json"
            )
        )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    fake_cluster = Cluster()
    fake_cluster.start()
    yield fake_cluster
    fake_cluster.stop()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[KubeClient]:
    runner = asyncio.Runner()

    async def create() -> AsyncKubeClient:
        return AsyncKubeClient(Api(Access(cluster.server.url), agent="tests"))

    with KubeClient(runner, runner.run(create())) as kube_client:
        yield kube_client


@pytest.fixture
def kubeconfig(cluster: Cluster, tmp_path: Path) -> Path:
    """A kubeconfig whose context has the namespace `ml`."""
    path = tmp_path / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": cluster.server.url}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "ml"}}
        ],
    }
    path.write_text(json.dumps(document))
    return path
