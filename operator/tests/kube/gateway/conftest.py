"""A gateway on the loopback with real TLS, a fake API server, and real or raw sidecars."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import AssignedNode, Assignment, FlyerJob, FlyerJobStatus, JobHistory, load_manifest
from flyer.engine import Signal, Start
from flyer.kube.gateway import (
    Gateway,
    GatewayMetrics,
    GatewaySettings,
    IdentityUnknownError,
    PodIdentity,
    TokenRefusedError,
    certificates_of,
    renewed,
)
from flyer.sidecar.settings import SidecarSettings
from flyer.sidecar.sidecar import Sidecar
from flyer.sidecar.wire import VERSION, encode
from prometheus_client import CollectorRegistry

from fakekube.leaks import nothing_left

from .tokens import token_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

MANIFEST = """
apiVersion: fireflyer.dev/v1alpha1
kind: FlyerJob
metadata: {{name: {name}, namespace: lab, uid: uid-{name}}}
spec:
  nodes: {nodes}
  ranksPerNode: 2
  template:
    spec:
      containers: [{{name: trainer, image: train, command: [python, train.py]}}]
"""
DATA = renewed(None, ["localhost", "127.0.0.1"], datetime.now(UTC))
SETTINGS = GatewaySettings(
    host="127.0.0.1",
    port=0,
    hello_seconds=30,
    beat_seconds=0.2,
    sidecars_beat_seconds=0.2,
    silence_seconds=60,
    progress_seconds=0.05,
    first_failure_seconds=0.3,
    peer_lost_seconds=0.6,
    account_seconds=0.5,
)


class FakeIdentities:
    """Reviews of tokens `token_of(POD)`; the API server may be unreachable."""

    def __init__(self) -> None:
        self.pods: dict[str, PodIdentity] = {}
        self.expired: set[str] = set()
        self.away = False
        self.reviews = 0
        self.slow: asyncio.Event | None = None
        """Until it is set, reviews of unknown tokens block."""

    async def review(self, token: str) -> PodIdentity:
        self.reviews += 1
        await asyncio.sleep(0)
        if self.away:
            raise IdentityUnknownError("connection refused")
        pod = self.pods.get(token)
        if pod is None and self.slow is not None:
            await self.slow.wait()
        if pod is None or token in self.expired:
            raise TokenRefusedError("not authenticated")
        return pod


class Raw:
    """A client that sends arbitrary lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *lines: object) -> None:
        for line in lines:
            if isinstance(line, bytes):
                self.writer.write(line)
            elif isinstance(line, dict):
                self.writer.write(json.dumps(line).encode() + b"\n")
            else:
                self.writer.write(encode(line))  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            await self.writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """The next line; None at the end."""
        try:
            async with asyncio.timeout(60):
                line = await self.reader.readline()
        except OSError:
            return None
        return json.loads(line) if line else None

    async def hear_kind(self, kind: str) -> dict[str, Any] | None:
        """The next line of this kind; None at the end."""
        while (message := await self.receive()) is not None:
            if message["kind"] == kind:
                return message
        return None

    async def refused(self) -> str | None:
        """The code of the refusal that ends the stream; None without one."""
        message = await self.hear_kind("refusal")
        return message["code"] if message else None

    def close(self) -> None:
        self.writer.transport.abort()


class GatewayHarness:
    """One gateway, its gangs and their events."""

    def __init__(self, settings: GatewaySettings, folder: Path) -> None:
        self.identities = FakeIdentities()
        self.events: list[Any] = []
        self.changed = asyncio.Event()
        self.stores = True  # reported events, soon afterwards
        self.settings = settings
        self.folder = folder
        self.registry = CollectorRegistry()
        self._exits = contextlib.AsyncExitStack()
        self.sidecars: dict[str, Sidecar] = {}
        self.port = 0

    async def open(self, port: int = 0) -> None:
        self.registry = CollectorRegistry()
        self.gateway = Gateway(
            enqueue=self._enqueue,
            identities=self.identities,
            settings=replace(self.settings, port=port),
            metrics=GatewayMetrics(self.registry),
        )
        self.gateway.use(certificates_of(DATA))
        self.gateway.listen()
        self.port = self.gateway.port
        self.serving = asyncio.create_task(self.gateway.serve())

    async def shut(self) -> None:
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)

    async def close(self) -> None:
        await self._exits.aclose()
        await self.shut()

    def _enqueue(self, event: Any) -> None:
        self.events.append(event)
        self.changed.set()
        if self.stores:
            asyncio.get_running_loop().call_soon(self.gateway.stored, [event])

    async def event(self, kind: type, job: str | None = None, seconds: float = 60) -> Any:
        """Wait for the first event of a kind."""
        async with asyncio.timeout(seconds):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and job in (None, event.job):
                        return event
                self.changed.clear()
                await self.changed.wait()

    def count(self, reason: str) -> float:
        value = self.registry.get_sample_value("flyer_gateway_refusals_total", {"reason": reason})
        assert value is not None, reason
        return value

    async def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    def gang(self, name: str = "gpt", nodes: int = 2, attempt: int = 1) -> SimpleNamespace:
        """A starting job, with its pods' tokens."""
        (job,) = load_manifest(MANIFEST.format(name=name, nodes=nodes))
        job = job.replace(status=FlyerJobStatus(history=JobHistory(id=job.metadata.uid)))
        assigned = tuple(
            AssignedNode(name=f"a{i}", zone="A", first_rank=2 * i) for i in range(nodes)
        )
        assignment = Assignment(epoch=1, nodes=assigned, cross_zone_pair=(), reserved_at=0.0)
        start = Start(job.key, attempt, assignment, None, 7)
        pods = []
        for i in range(nodes):
            pod_name = f"{name}-{attempt}-{i}"
            pod = PodIdentity("lab", pod_name, f"uid-{pod_name}", "127.0.0.1")
            self.identities.pods[token_of(pod_name)] = pod
            pods.append(pod)
        return SimpleNamespace(
            job=job, uid=job.metadata.uid, key=job.key, start=start, pods=pods, attempt=attempt
        )

    def expect(self, gang: SimpleNamespace) -> None:
        self.gateway.expect(gang.job, gang.start, gang.pods)

    def signal(self, gang: SimpleNamespace, seconds: float = 60) -> None:
        deadline = time.time() + seconds
        self.gateway.signal(
            Signal(gang.key, gang.attempt, deadline, "Preempted", "lab/other", uid=gang.uid)
        )

    def sidecar_settings(self, name: str, **changes: Any) -> SidecarSettings:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        token = folder / "token"
        if not token.exists():
            token.write_text(token_of(name) + "\n")
        settings = SidecarSettings(
            host="127.0.0.1",
            port=self.port,
            authority=certificates_of(DATA).bundle,
            server_name="localhost",
            token_file=token,
            run_folder=folder,
            retry_seconds=0.02,
            retry_seconds_max=0.2,
        )
        return replace(settings, **changes)

    async def sidecar(self, name: str, **changes: Any) -> Sidecar:
        """A real sidecar of the pod."""
        sidecar = Sidecar(self.sidecar_settings(name, **changes))
        running = asyncio.create_task(sidecar.run())
        self.sidecars[name] = sidecar

        async def end() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        self._exits.push_async_callback(end)
        sidecar.end = end  # type: ignore[attr-defined]
        return sidecar

    async def raw(self, address: str = "127.0.0.1") -> Raw:
        """A TLS connection without any message."""
        context = ssl.create_default_context(cadata=certificates_of(DATA).bundle)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, server_hostname="localhost", limit=1 << 24,
            local_addr=(address, 0),
        )  # fmt: skip
        raw = Raw(reader, writer)
        self._exits.callback(raw.close)
        return raw

    async def greeted(self, name: str, version: int = VERSION, address: str = "127.0.0.1") -> Raw:
        """A raw client that the gateway accepts as the pod's sidecar."""
        raw = await self.raw(address)
        await raw.send({"kind": "hello", "version": version, "token": token_of(name)})
        welcome = await raw.receive() or {}
        assert (welcome["kind"], welcome["version"]) == ("welcome", min(version, VERSION))
        return raw


@pytest.fixture
def settings() -> GatewaySettings:
    return SETTINGS


@pytest.fixture
async def harness(settings: GatewaySettings, tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    async with nothing_left():
        harness = GatewayHarness(settings, tmp_path)
        await harness.open()
        yield harness
        await harness.close()


@pytest.fixture
def make_job() -> Callable[..., FlyerJob]:
    def make(name: str = "gpt", nodes: int = 2) -> FlyerJob:
        (job,) = load_manifest(MANIFEST.format(name=name, nodes=nodes))
        return job

    return make
