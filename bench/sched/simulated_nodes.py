"""Sidecars of pods that no kubelet runs: one process, the gateway's real protocol over TLS.

    python -m bench.sched.simulated_nodes KUBECONFIG PORT…

Each has its pod's own projected token. Commands come as lines on standard input: `go` connects the
sidecars of all running and future pods, `hold` disconnects them, `cooperate` lets jobs save and
release when they are asked, `ignore` makes them ignore suspend requests, `lose NODE` removes a
node. Events are reported as JSON lines: how many sidecars run their ranks, and when each was asked
to suspend (seconds since the epoch). A released pod ends as with a kubelet: by its status.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import ssl
import sys
import time
from typing import Any, Final

from flyer.kube.apiserver import Api, Cache, Limits, find_access
from flyer.kube.apiserver.errors import ApiError
from flyer.kube.apiserver.resources import PODS, SECRETS, Resource
from flyer.kube.gateway.certificates import SECRET_NAME
from flyer.kube.pods import TOKEN_AUDIENCE
from flyer.kube.pods.names import LABEL_JOB
from flyer.sidecar.wire import (
    ORDER_BYTES_MAX,
    Beat,
    End,
    Hello,
    LauncherState,
    Order,
    Refusal,
    Report,
    encode,
    parse_from_gateway,
)

from bench.sched.loads import NAMESPACE

SYSTEM: Final = "fireflyer-system"
ACCOUNTS: Final = Resource("", "v1", "serviceaccounts")
HANDSHAKES: Final = 32
"""Maximum number of concurrent handshakes; real nodes send fewer."""
BEAT_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 0.2
KILL_SECONDS: Final = 1.0
"""Time from a stop command to the end of ranks that ignore SIGTERM."""
PORT: Final = 29500


class SimulatedNodes:
    """All sidecars."""

    def __init__(self, api: Api, ports: list[int]) -> None:
        self.cooperates = False
        self._api = api
        self._ports = ports
        self._context: ssl.SSLContext | None = None
        self._handshakes = asyncio.Semaphore(HANDSHAKES)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._running: set[str] = set()
        self._reported = -1
        self._lost: set[str] = set()

    async def execute(self, command: str) -> None:
        """Execute one command."""
        name, _, argument = command.partition(" ")
        if name == "go" and self._watch is None:
            cache = Cache(
                self._api, PODS, lambda value: value, self._changed, labelSelector=LABEL_JOB
            )
            self._watch = asyncio.create_task(cache.run())
        elif name == "hold" and self._watch is not None:
            self._watch.cancel()
            self._watch = None
            for task in self._tasks.values():
                task.cancel()
            self._tasks.clear()
            self._lost.clear()
        elif name == "lose":
            # The node is lost: its sidecars send nothing more and do not close their connections.
            self._lost.add(argument)
        else:
            self.cooperates = {"cooperate": True, "ignore": False}.get(name, self.cooperates)

    def report(self, **fields: Any) -> None:
        """Report to the parent process."""
        print(json.dumps(fields), flush=True)

    async def count(self) -> None:
        """Report the number of running sidecars whenever it changes."""
        while True:
            if len(self._running) != self._reported:
                self._reported = len(self._running)
                self.report(running=self._reported)
            await asyncio.sleep(0.1)

    def _changed(self, _key: Any, _before: Any, pod: dict[str, Any] | None) -> None:
        if pod is None:
            return
        uid, status = pod["metadata"]["uid"], pod.get("status") or {}
        ended = "deletionTimestamp" in pod["metadata"] or status.get("phase") != "Running"
        if ended and uid in self._tasks and status.get("phase") != "Pending":
            self._tasks.pop(uid).cancel()
        elif not ended and uid not in self._tasks:
            self._tasks[uid] = asyncio.create_task(self._live(pod))

    async def _live(self, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        report = Report(revision=1, launcher=LauncherState.WAITING, port=PORT)
        number = 0
        try:
            while True:
                with contextlib.suppress(OSError, ApiError, asyncio.IncompleteReadError):
                    report = await self._run_stream(pod, report, self._ports[number])
                if report.end is not None or pod["spec"]["nodeName"] in self._lost:
                    return
                self._running.discard(uid)
                number = (number + 1) % len(self._ports)  # until it is the leader
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._running.discard(uid)

    async def _run_stream(self, pod: dict[str, Any], report: Report, port: int) -> Report:
        async with self._handshakes:
            token = await self._token(pod)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=await self._trusted(), limit=ORDER_BYTES_MAX,
                server_hostname=f"flyer-gateway.{SYSTEM}.svc",
            )  # fmt: skip
            writer.write(encode(Hello(token)) + encode(report))
            await writer.drain()
            line = await reader.readline()  # welcome, or a refusal
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        beating = asyncio.create_task(self._beat(pod, writer))
        try:
            while line:
                message = parse_from_gateway(line)
                if isinstance(message, Refusal):
                    break
                if isinstance(message, Order) and pod["spec"]["nodeName"] not in self._lost:
                    if message.kill:
                        await asyncio.sleep(KILL_SECONDS)
                    suspend_requested = message.suspend is not None and not report.suspended
                    if suspend_requested:
                        self.report(suspend=name, time=time.time())
                    following = self._follow(report, message)
                    if following != report:
                        report = following
                        writer.write(encode(report))
                    if report.launcher is LauncherState.RUNNING:
                        self._running.add(uid)
                    if report.end is not None:
                        await writer.drain()
                        await self._end(pod, report.end.code)
                        break
                line = await reader.readline()
        finally:
            beating.cancel()
            writer.transport.abort()
        return report

    def _follow(self, report: Report, order: Order) -> Report:
        """The report after an order, as if the job reacted to it immediately."""
        launcher, suspended = report.launcher, report.suspended
        revision = report.revision + 1
        if order.start is not None and launcher is LauncherState.WAITING:
            launcher = LauncherState.RUNNING
        suspended = suspended or order.suspend is not None
        if (launcher, suspended) == (report.launcher, report.suspended) and not order.kill:
            return report
        leaves = suspended and self.cooperates
        return Report(
            revision=revision, port=PORT, ranks_seen=8,
            launcher=LauncherState.ENDED if leaves or order.kill else launcher,
            suspended=suspended, received=leaves, released=leaves,
            end=End(-signal.SIGKILL) if order.kill else End(0) if leaves else None,
        )  # fmt: skip

    async def _beat(self, pod: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        while pod["spec"]["nodeName"] not in self._lost:
            writer.write(encode(Beat()))
            await asyncio.sleep(BEAT_SECONDS)

    async def _end(self, pod: dict[str, Any], code: int) -> None:
        exit_code, reason = (128 - code, "Error") if code else (0, "Completed")
        metadata = pod["metadata"]
        statuses = [
            {"name": container["name"], "image": container["image"], "imageID": "", "ready": False,
             "restartCount": 0, "state": {"terminated": {"exitCode": exit_code, "reason": reason}}}
            for container in pod["spec"]["containers"]
        ]  # fmt: skip
        phase = "Failed" if code else "Succeeded"
        status = {"phase": phase, "containerStatuses": statuses}
        with contextlib.suppress(ApiError):
            await self._api.merge(
                PODS, metadata["name"], {"status": status}, metadata["namespace"], "status"
            )

    async def _token(self, pod: dict[str, Any]) -> str:
        metadata = pod["metadata"]
        reference = {
            "apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"],
        }  # fmt: skip
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [TOKEN_AUDIENCE], "boundObjectRef": reference},
        }
        response = await self._api.post(ACCOUNTS, "default", NAMESPACE, "token", request)
        return str(response["status"]["token"])

    async def _trusted(self) -> ssl.SSLContext:
        if self._context is None:
            secret = await self._api.get(SECRETS, SECRET_NAME, SYSTEM)
            authority = base64.b64decode(secret["data"]["ca.crt"]).decode()
            self._context = ssl.create_default_context(cadata=authority)
        return self._context


async def main(kubeconfig: str, ports: list[int]) -> None:
    """Run until standard input ends."""
    access = await find_access(kubeconfig)
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async with Api(access, agent="fleet", limits=Limits(concurrency_max=HANDSHAKES)) as api:
        nodes = SimulatedNodes(api, ports)
        counting = asyncio.create_task(nodes.count())
        while line := await commands.readline():
            await nodes.execute(line.decode().strip())
        counting.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], [int(arg) for arg in sys.argv[2:]]))
