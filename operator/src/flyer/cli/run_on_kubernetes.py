"""`flyer run` on Kubernetes: create the jobs, follow them, return their exit status."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from flyer.cli.output import Output, print_result, say
from flyer.cli.run import finish
from flyer.cli.screens import event_line
from flyer.errors import ExitStatus, FlyerError

if TYPE_CHECKING:
    from pathlib import Path

    from flyer.cli.target import Target
    from flyer.client.kubernetes import AsyncKubeClient
    from flyer.views import JobView

__all__ = ["run_on_kubernetes"]

# Limit for the last log lines of a job that has ended.
LOGS_SECONDS_MAX = 30.0
_OVER = ("Succeeded", "Failed", "Suspended")


def run_on_kubernetes(
    manifest: Path | None, target: Target, logs: str, output: Output, *, detach: bool
) -> int:
    """The whole verb; returns the exit status."""
    if manifest is None:
        raise FlyerError.usage(
            "missing manifest",
            "use `flyer run JOB.yaml`",
        )
    if logs not in ("all", "none") and not logs.isdecimal():
        raise FlyerError.usage(f"invalid value `{logs}` for --logs: expected a rank, all or none")
    from flyer.client.kubernetes import connect_kube

    with connect_kube(
        kubeconfig=target.kubeconfig, context=target.context, namespace=target.namespace
    ) as client:
        jobs = client.run_all(manifest)
        for job in jobs:
            say(f"{job.key} created")
        if detach:
            if output in (Output.JSON, Output.YAML):
                print_result(jobs, output)
            else:
                key = jobs[0].key
                say(f"next: flyer why {key}; flyer logs -f {key}; flyer show {key}; flyer ps -w")
            return ExitStatus.OK
        quiet = output in (Output.JSON, Output.YAML)
        follower = _Follower(client.asynchronous, jobs, "none" if quiet else logs, quiet=quiet)
        try:
            client.drive(follower.follow())
        except KeyboardInterrupt:
            names = " ".join(job.key for job in jobs)
            say(f"detached from {names}; follow with `flyer logs -f`, end with `flyer stop`")
            return 128 + signal.SIGINT
    never = [job for job in follower.last.values() if job.key in follower.never]
    for job in never:
        say(f"{job.key} can never run on this cluster: {job.message}; it stays queued")
    if never:
        return ExitStatus.NEVER
    return finish(follower.last, output, driven=False)


class _Follower:
    """Prints events to stderr and the output of the selected ranks to stdout."""

    def __init__(
        self, client: AsyncKubeClient, jobs: list[JobView], logs: str, *, quiet: bool
    ) -> None:
        self.last = {job.key: job for job in jobs}
        self.never: set[str] = set()
        self._client = client
        self._logs = logs
        self._quiet = quiet

    async def follow(self) -> None:
        """Follow until every job has ended, is suspended, or can never run."""
        readers = []
        if self._logs != "none":
            readers = [asyncio.create_task(self._print_logs(key)) for key in self.last]
        namespaces = {job.namespace for job in self.last.values()}
        self._client.all_namespaces = len(namespaces) > 1
        self._client.namespace = min(namespaces)
        try:
            async for item in self._client.watch():
                if item.event is not None and item.event.job in self.last and not self._quiet:
                    say(event_line(item.event))
                if item.job is not None and item.job.key in self.last:
                    self.last[item.job.key] = item.job
                    await self._judge(item.job)
                if all(self._is_over(job) for job in self.last.values()):
                    break
            if readers and all(job.finished for job in self.last.values()):
                await asyncio.wait(readers, timeout=LOGS_SECONDS_MAX)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _judge(self, job: JobView) -> None:
        """Note the verdict Never, which is in the status."""
        if job.state == "Queued":
            document = await self._client.document(job.key)
            pending = (document.get("status") or {}).get("pending") or {}
            if pending.get("verdict") == "Never":
                self.never.add(job.key)
                return
        self.never.discard(job.key)

    def _is_over(self, job: JobView) -> bool:
        return job.state in _OVER or job.key in self.never

    async def _print_logs(self, key: str) -> None:
        rank = None if self._logs == "all" else int(self._logs)
        job = self.last[key]
        several = rank is None and job.nodes * job.ranks_per_node > 1
        try:
            async for line in self._client.logs(key, rank=rank, follow=True):
                print(f"[{line.rank}] {line.text}" if several else line.text, flush=True)
        except FlyerError as error:
            say(f"flyer: cannot follow the logs of {key}: {error.message}")
