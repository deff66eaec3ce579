"""Blocking client: the methods of AsyncKubeClient, run in an event loop of the client."""

from __future__ import annotations

import asyncio
import functools
import os
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from kubernetes.aio import config

from flyer.client.kubernetes.asynchronous import AsyncKubeClient
from flyer.client.kubernetes.errors import words_for
from flyer.errors import FlyerError
from flyer.kube.apiserver import AccessError, Api, find_access
from flyer.kube.apiserver.access import SERVICE_ACCOUNT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from pathlib import Path

    from flyer.views import JobView

__all__ = ["KubeClient", "connect_kube"]

P = ParamSpec("P")
T = TypeVar("T")
AGENT = "flyer"


def connect_kube(
    *,
    kubeconfig: str = "",
    context: str = "",
    namespace: str = "",
    all_namespaces: bool = False,
) -> KubeClient:
    """A client of the cluster that kubectl would use. Nothing is sent before the first call.

    Without `namespace` it is the context's own, else `default`.
    """
    runner = asyncio.Runner()
    try:
        access = runner.run(find_access(kubeconfig, context))
    except AccessError as error:
        runner.close()
        raise words_for(error) from error
    own = namespace or namespace_of(kubeconfig, context) or "default"

    async def create() -> AsyncKubeClient:
        return AsyncKubeClient(
            Api(access, agent=AGENT), namespace=own, all_namespaces=all_namespaces
        )

    return KubeClient(runner, runner.run(create()))


def namespace_of(kubeconfig: str, context: str) -> str:
    """The namespace that the kubeconfig's context names; in a pod its own."""
    if not kubeconfig and (SERVICE_ACCOUNT / "namespace").exists():
        return (SERVICE_ACCOUNT / "namespace").read_text().strip()
    try:
        contexts, active = config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
            config_file=kubeconfig or os.environ.get("KUBECONFIG") or None
        )
    except (config.ConfigException, OSError):
        return ""
    entry = next((item for item in contexts if item["name"] == context), active)
    return str((entry or {}).get("context", {}).get("namespace") or "")


def _blocking(
    method: Callable[Concatenate[AsyncKubeClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[KubeClient, P], T]:
    """The method of KubeClient that runs a coroutine of AsyncKubeClient to its end."""

    @functools.wraps(method)
    def call(self: KubeClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.drive(method(self.asynchronous, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncKubeClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[KubeClient, P], Iterator[T]]:
    """The method of KubeClient that iterates over a stream of AsyncKubeClient."""

    @functools.wraps(method)
    def call(self: KubeClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self.iterate(method(self.asynchronous, *args, **kwargs))

    return call


class KubeClient:
    """Client of one API server with the rights of the caller. For one thread."""

    driven = True

    def __init__(self, runner: asyncio.Runner, client: AsyncKubeClient) -> None:
        self._runner = runner
        self.asynchronous = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self.asynchronous.close())
        self._runner.close()

    def run(self, manifest: str | Path) -> JobView:
        """Submit a manifest with one job."""
        jobs = self.run_all(manifest)
        if len(jobs) != 1:
            raise FlyerError.usage(
                f"`{manifest}` holds {len(jobs)} jobs", "submit them with `run_all`"
            )
        return jobs[0]

    run_all = _blocking(AsyncKubeClient.run_all)
    jobs = _blocking(AsyncKubeClient.jobs)
    job = _blocking(AsyncKubeClient.job)
    document = _blocking(AsyncKubeClient.document)
    why = _blocking(AsyncKubeClient.why)
    suspend = _blocking(AsyncKubeClient.suspend)
    resume = _blocking(AsyncKubeClient.resume)
    stop = _blocking(AsyncKubeClient.stop)
    requeue = _blocking(AsyncKubeClient.requeue)
    set_priority = _blocking(AsyncKubeClient.set_priority)
    nodes = _blocking(AsyncKubeClient.nodes)
    queues = _blocking(AsyncKubeClient.queues)
    quotas = _blocking(AsyncKubeClient.quotas)
    wait = _blocking(AsyncKubeClient.wait)
    watch = _iterating(AsyncKubeClient.watch)
    events = _iterating(AsyncKubeClient.events)
    logs = _iterating(AsyncKubeClient.logs)

    def drive(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine over `asynchronous` in this client's event loop."""
        return self._runner.run(call)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Iterate over an asynchronous iterator in this client's event loop."""
        loop = self._runner.get_loop()
        try:
            while True:
                try:
                    yield loop.run_until_complete(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            loop.run_until_complete(items.aclose())  # type: ignore[attr-defined]
