"""Containers of simulated pods: the product's sidecar, and a scripted launcher with one rank.

The sidecar is `flyer.sidecar.Sidecar` with the settings from the pod's environment, over real
sockets: hello, start order, suspension, reports and reconnects are the product's code. The launcher
and the rank follow `flyer.job.container` and `flyer.job.handle` in one task each, because processes
would dominate the cost of a test.

A rank that is suspended, or gets a SIGTERM, saves one more step and releases; node rank 0 reports
for the gang, and the others exit once it has saved. An order to kill is SIGKILL at once, without
the launcher's second of grace. `Behaviour` has the variants.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from flyer.job.container import EXIT_NO_START, LAUNCHER_SOCKET
from flyer.job.pod import EXIT_SUSPENDED
from flyer.job.protocol import (
    Change,
    Checkpoint,
    Hello,
    Received,
    Release,
    SuspendCode,
    Watch,
    Welcome,
    encode,
    parse_reply,
)
from flyer.kube.pods.names import SIDECAR_CONTAINER
from flyer.kube.pods.settings import TOKEN_AUDIENCE
from flyer.sidecar.settings import SidecarSettings
from flyer.sidecar.sidecar import JOB_SOCKET, Sidecar

from fakekube.nodes.exits import KILLED, TERMINATED, Exit

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Context

    from flyer.job.protocol import Reply, Request

    from fakekube.apiserver.identities import Tokens
    from fakekube.apiserver.tables import Object
    from fakekube.nodes.network import PodNetwork

__all__ = ["Behaviour", "Containers"]

LINE_BYTES_MAX: Final = 1 << 20
DONE_SECONDS: Final = 3.0  # as in the launcher
LEAVE_SECONDS: Final = 5.0
"""Time for which a released rank waits for SIGTERM, as in `Job.release`."""
# The sidecar's pauses between attempts, shortened for tests.
RETRY_SECONDS: Final = 0.02
RETRY_SECONDS_MAX: Final = 0.2
REPORT_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Behaviour of a pod's processes when they are asked to exit."""

    saves: bool = True
    """Whether rank 0 writes a checkpoint before it releases."""
    deaf: bool = False
    """Whether ranks ignore the suspension and SIGTERM, so that only SIGKILL ends them."""
    hung: bool = False
    """Whether the launcher ignores orders once its rank runs."""


@dataclass(slots=True)
class _Gang:
    """State of an attempt that collectives would distribute among its ranks."""

    saved: asyncio.Event = field(default_factory=asyncio.Event)


class _Pod:
    """The containers of one pod."""

    def __init__(
        self,
        pod: Object,
        settings: SidecarSettings,
        gang: _Gang,
        address: str,
        context: Context,
        exited: Callable[[Exit], None],
        behaviour: Behaviour,
    ) -> None:
        self.gang = gang
        self.address = address
        self.sidecar = Sidecar(settings)
        self._folder = settings.run_folder
        self._node_rank = int(pod["metadata"]["labels"]["fireflyer.dev/node-rank"])
        self._behaviour = behaviour
        self._exited = exited
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._suspended = asyncio.Event()
        self._terminated = asyncio.Event()
        self._running = False
        self._writer: asyncio.StreamWriter | None = None
        self._done = asyncio.Event()
        self.over = asyncio.Event()
        """The main container has ended, and its launcher has reported it if it could."""
        work = [self.sidecar.run(), self._launch(), self._main()]
        self._serving, *self._others = [
            asyncio.create_task(coroutine, context=context) for coroutine in work
        ]

    # -- calls of the kubelet ------------------------------------------------------------------

    def exit(self, end: Exit) -> None:
        """End the main container's processes, unless they have ended."""
        if not self._exit.done():
            self._exit.set_result(end)

    def terminate(self) -> None:
        """Send SIGTERM to the main container."""
        if self._behaviour.hung and self._running:
            return
        if not self._running:
            self.exit(TERMINATED)
        self._terminated.set()
        self._suspended.set()

    async def stop_sidecar(self) -> None:
        """The main container has ended, and the sidecar gets its SIGTERM."""
        await self.sidecar.finish()
        await self.drop()

    async def drop(self) -> None:
        """Send SIGKILL to all containers."""
        tasks = [self._serving, *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.transport.abort()

    # -- the main container --------------------------------------------------------------------

    async def _main(self) -> None:
        end = await self._exit
        if end.accounted and self._running and self._writer is not None:
            self._send({"op": "ended", "code": -end.signal or end.status, "failure": _blame(end)})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DONE_SECONDS):
                    await self._done.wait()
        self.over.set()
        self._exited(end)

    async def _launch(self) -> None:
        """The launcher: it waits for the start order, then for its rank and for orders."""
        while not (self._folder / LAUNCHER_SOCKET).exists():  # noqa: ASYNC110 - as its own poll
            await asyncio.sleep(0.002)
        reader, self._writer = await asyncio.open_unix_connection(
            str(self._folder / LAUNCHER_SOCKET), limit=LINE_BYTES_MAX
        )
        self._send({"op": "launcher", "state": "waiting"})
        async with asyncio.TaskGroup() as group:
            while line := await reader.readline():
                message = json.loads(line)
                match message["kind"]:
                    case "start" if not self._running:
                        self._running = True
                        self._send({"op": "launcher", "state": "running"})
                        group.create_task(self._rank(message["pod"]))
                    case "terminate" | "kill" if self._behaviour.hung and self._running:
                        pass
                    case "terminate" | "kill" if not self._running:
                        self.exit(Exit(EXIT_NO_START, reason="Error"))
                    case "terminate":
                        self.terminate()
                    case "kill":
                        self.exit(replace(KILLED, reason="Error"))
                    case "done":
                        self._done.set()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None, "connected"
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    # -- its rank ------------------------------------------------------------------------------

    async def _rank(self, pod: dict[str, Any]) -> None:
        rank = pod["node_rank"] * pod["ranks_per_node"]
        async with _Socket(self._folder / JOB_SOCKET) as socket:
            welcome = await socket.ask(Hello(rank))
            assert isinstance(welcome, Welcome), welcome
            watching = asyncio.create_task(self._watch(rank))
            try:
                await self._suspended.wait()
                if not self._behaviour.deaf:
                    await self._save(socket, welcome.restore_step or 0)
                    self.exit(Exit(EXIT_SUSPENDED, reason="Error"))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, rank: int) -> None:
        async with _Socket(self._folder / JOB_SOCKET) as socket:
            await socket.ask(Hello(rank))
            revision = 0
            while not self._suspended.is_set():
                change = await socket.ask(Watch(revision))
                assert isinstance(change, Change), change
                revision = change.revision
                if change.suspend_code is not SuspendCode.NONE:
                    self._suspended.set()

    async def _save(self, socket: _Socket, step: int) -> None:
        if self._node_rank != 0:
            await self.gang.saved.wait()
        else:
            await socket.ask(Received())
            if self._behaviour.saves:
                await socket.ask(Checkpoint(step + 1, f"step-{step + 1}", durable=True))
            self.gang.saved.set()
            await socket.ask(Release(step + 1))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._terminated.wait()


class _Socket:
    """Serve a connection of the job socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    async def ask(self, request: Request) -> Reply:
        """Responds in order."""
        self._writer.write(encode(request))
        return parse_reply(await self._reader.readuntil(b"\n"))


def _blame(end: Exit) -> dict[str, Any] | None:
    """The failure that a launcher reports with its exit status."""
    if (not end.status and not end.signal) or end.status in (EXIT_SUSPENDED, EXIT_NO_START):
        return None
    if end.signal == TERMINATED.signal:
        return None  # it terminated its ranks itself
    return {
        "rank": 0,  # the sidecar adds the pod's first rank
        "time": time.time(),
        "exit_status": None if end.signal else end.status,
        "signal": end.signal or None,
        "traceback": end.message or None,
    }


class Containers:
    """Containers of a cluster's gang pods; other pods have no processes."""

    def __init__(self, tokens: Tokens, network: PodNetwork) -> None:
        self.behaviour = Behaviour()  # of pods that start later
        self._tokens = tokens
        self._network = network
        self._pods: dict[str, _Pod] = {}
        self._gangs: dict[tuple[str, str], _Gang] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="pods-"))
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, pod: Object, address: str, exited: Callable[[Exit], None]) -> None:
        """Run the pod's containers. `exited` is called when the main one has ended."""
        environment = _environment(pod)
        if environment is None:
            return
        metadata = pod["metadata"]
        folder = self._folder / metadata["uid"]
        folder.mkdir()
        token = self._tokens.issue(
            metadata["namespace"], pod=metadata["name"], audiences=(TOKEN_AUDIENCE,)
        )
        (folder / "token").write_text(token)
        settings = replace(
            SidecarSettings.read(environment),
            token_file=folder / "token",
            run_folder=folder,
            retry_seconds=RETRY_SECONDS,
            retry_seconds_max=RETRY_SECONDS_MAX,
            report_seconds=REPORT_SECONDS,
        )
        owner, attempt = metadata["ownerReferences"][0], metadata["labels"]["fireflyer.dev/attempt"]
        gang = self._gangs.setdefault((owner["uid"], attempt), _Gang())
        context = self._network.of(address)
        self._pods[metadata["uid"]] = _Pod(
            pod, settings, gang, address, context, exited, self.behaviour
        )

    def sidecar(self, uid: str) -> Sidecar:
        """A pod's sidecar."""
        return self._pods[uid].sidecar

    def exit(self, uid: str, end: Exit) -> bool:
        """End the main container. Returns whether there is one."""
        pod = self._pods.get(uid)
        if pod is not None:
            pod.exit(end)
        return pod is not None

    def cut(self, uid: str) -> None:
        """The pod's node has lost its network or power."""
        pod = self._pods.get(uid)
        if pod is not None:
            self._network.cut(pod.address)

    async def terminate(self, uid: str, seconds: float) -> None:
        """Send SIGTERM, then SIGKILL after `seconds`; return when the main container has ended."""
        pod = self._pods.get(uid)
        if pod is None:
            return
        pod.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await pod.over.wait()
        pod.exit(KILLED)
        await pod.over.wait()

    async def stop(self, uid: str) -> None:
        """The main container has ended: stop the sidecar."""
        pod = self._pods.get(uid)
        if pod is not None:
            await pod.stop_sidecar()
            self._pods.pop(uid, None)

    def drop(self, uid: str) -> None:
        """Send SIGKILL to all: the pod's node was lost, or the pod is unknown.

        Its connections are reset, as by a node that has rebooted; a node that is only silent would
        keep them.
        """
        pod = self._pods.pop(uid, None)
        if pod is not None:
            task = asyncio.get_running_loop().create_task(pod.drop())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Whether nothing runs."""
        for uid in list(self._pods):
            self.drop(uid)
        await asyncio.gather(*self._ending, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _environment(pod: Object) -> dict[str, str] | None:
    """The environment of the pod's sidecar, if it has one."""
    spec = pod["spec"]
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        if container.get("name") == SIDECAR_CONTAINER:
            return {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}
    return None
