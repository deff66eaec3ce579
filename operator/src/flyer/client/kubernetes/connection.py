"""The same verbs as plain methods: an event loop of its own runs the asynchronous client."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Self, TypeVar

from flyer.client.kubernetes.asynchronous import FINISHED_STATES, AsyncKubeClient
from flyer.client.kubernetes.errors import words_for
from flyer.errors import FlyerError
from flyer.kube.apiserver import AccessError, Api, find_access

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
    from pathlib import Path

    from flyer.client.logs import LogLine
    from flyer.client.protocol import WatchItem
    from flyer.views import EventView, JobView, NodeView, QueueView, QuotaView, WhyView

__all__ = ["KubeClient", "connect_kube"]

T = TypeVar("T")
AGENT = "flyer"


def connect_kube(
    *,
    kubeconfig: str = "",
    context: str = "",
    namespace: str = "",
    all_namespaces: bool = False,
) -> KubeClient:
    """A client of the cluster that kubectl would talk to. Nothing is sent before the first call.

    Without `namespace` it is the context's own, else `default`.
    """
    runner = asyncio.Runner()
    try:
        access = runner.run(find_access(kubeconfig, context))
    except AccessError as error:
        runner.close()
        raise words_for(error) from error
    own = namespace or namespace_of(kubeconfig, context) or "default"

    async def made() -> AsyncKubeClient:
        return AsyncKubeClient(
            Api(access, agent=AGENT), namespace=own, all_namespaces=all_namespaces
        )

    return KubeClient(runner, runner.run(made()))


def namespace_of(kubeconfig: str, context: str) -> str:
    """The namespace that the kubeconfig's context names; in a pod its own."""
    from kubernetes.aio import config

    from flyer.kube.apiserver.access import SERVICE_ACCOUNT

    if not kubeconfig and (SERVICE_ACCOUNT / "namespace").exists():
        return (SERVICE_ACCOUNT / "namespace").read_text().strip()
    try:
        contexts, active = config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
            config_file=kubeconfig or os.environ.get("KUBECONFIG") or None
        )
    except (config.ConfigException, OSError):
        return ""
    chosen = next((one for one in contexts if one["name"] == context), active)
    return str((chosen or {}).get("context", {}).get("namespace") or "")


class KubeClient:
    """One API server, with the caller's own rights. For one thread."""

    driven = True

    def __init__(self, runner: asyncio.Runner, client: AsyncKubeClient) -> None:
        self._runner = runner
        self.asynchronous = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._runner.run(self.asynchronous.close())
        self._runner.close()

    def run(self, manifest: str | Path) -> JobView:
        """Submit a manifest with one job."""
        found = self.run_all(manifest)
        if len(found) != 1:
            raise FlyerError.usage(
                f"`{manifest}` holds {len(found)} jobs", "submit them with `run_all`"
            )
        return found[0]

    def run_all(self, manifest: str | Path) -> list[JobView]:
        """Submit every job of a manifest, or none of them."""
        return self._do(self.asynchronous.run_all(manifest))

    def jobs(self) -> list[JobView]:
        """Every job, finished ones too."""
        return self._do(self.asynchronous.jobs())

    def job(self, name: str) -> JobView:
        """One job by `name` or `namespace/name`."""
        return self._do(self.asynchronous.job(name))

    def document(self, name: str) -> dict[str, Any]:
        """One job's FlyerJob object."""
        return self._do(self.asynchronous.document(name))

    def why(self, name: str) -> WhyView:
        """Every reason why a job does not run, and what would unblock it."""
        return self._do(self.asynchronous.why(name))

    def suspend(self, name: str, *, reason: str = "") -> JobView:
        """Ask a job to save and leave its nodes."""
        return self._do(self.asynchronous.suspend(name, reason=reason))

    def resume(self, name: str) -> JobView:
        """Let a suspended job queue again, in its old place."""
        return self._do(self.asynchronous.resume(name))

    def stop(self, name: str, *, reason: str = "", kill: bool = False) -> JobView:
        """End a job for good, with its grace or at once; its object stays."""
        return self._do(self.asynchronous.stop(name, reason=reason, kill=kill))

    def requeue(self, name: str, *, reason: str = "") -> JobView:
        """Make a job save, leave, and queue again at once."""
        return self._do(self.asynchronous.requeue(name, reason=reason))

    def set_priority(self, name: str, priority: str) -> JobView:
        """Change a job's priority; what runs keeps its nodes."""
        return self._do(self.asynchronous.set_priority(name, priority))

    def nodes(self) -> list[NodeView]:
        """Every node that gets gangs."""
        return self._do(self.asynchronous.nodes())

    def queues(self) -> list[QueueView]:
        """Every queue with what runs and what waits."""
        return self._do(self.asynchronous.queues())

    def quotas(self) -> list[QuotaView]:
        """Every quota, and per user what is used of it."""
        return self._do(self.asynchronous.quotas())

    def watch(
        self,
        *,
        timeout_seconds: float | None = None,
        since: int | None = None,
        beat_seconds: float | None = None,
    ) -> Iterator[WatchItem]:
        """The present state, then every change."""
        return self._each(
            self.asynchronous.watch(
                timeout_seconds=timeout_seconds, since=since, beat_seconds=beat_seconds
            )
        )

    def events(
        self,
        *,
        job: str | None = None,
        follow: bool = False,
        since: int = 0,
        timeout_seconds: float | None = None,
    ) -> Iterator[EventView]:
        """What happened; with `follow` what happens from now on."""
        return self._each(
            self.asynchronous.events(
                job=job, follow=follow, since=since, timeout_seconds=timeout_seconds
            )
        )

    def wait(
        self,
        name: str,
        *,
        timeout_seconds: float | None = None,
        states: Collection[str] = FINISHED_STATES,
    ) -> JobView:
        """Wait until a job is in one of `states`; FlyerError (Timeout) when it takes too long."""
        return self._do(
            self.asynchronous.wait(name, timeout_seconds=timeout_seconds, states=states)
        )

    def logs(
        self,
        name: str,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        follow: bool = False,
        timeout_seconds: float | None = None,
    ) -> Iterator[LogLine]:
        """Lines of a job's ranks over all attempts, each once, in order within a rank."""
        return self._each(
            self.asynchronous.logs(
                name, rank=rank, attempt=attempt, follow=follow, timeout_seconds=timeout_seconds
            )
        )

    def drive(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine over `asynchronous` in this client's event loop."""
        return self._do(call)

    def _do(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        loop = self._runner.get_loop()
        try:
            while True:
                try:
                    yield loop.run_until_complete(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            loop.run_until_complete(items.aclose())  # type: ignore[attr-defined]
