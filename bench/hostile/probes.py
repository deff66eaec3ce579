"""Request latencies of another tenant during the attack."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import threefs
from flyer.kube.apiserver.errors import ApiError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS, Resource

from bench.sched.loads import NAMESPACE
from bench.sched.testbed import SYSTEM, TestbedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flyer.kube.apiserver import Api

    from bench.sched.node_simulator import NodeSimulator
    from bench.sched.testbed import Testbed

__all__ = ["JOB", "Lease", "Probe", "Probes"]

JOB: Final = "victim"
CONFIG_MAPS: Final = Resource("", "v1", "configmaps")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases")
REVIEW: Final[dict[str, Any]] = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {
        "uid": "u1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": NAMESPACE,
        "operation": "CREATE",
        "object": {
            "metadata": {"name": "w", "labels": {"fireflyer.dev/inject": "true"}},
            "spec": {"containers": [{"name": "a", "image": "train:1"}]},
        },
    },
}
WEBHOOK_SECONDS: Final = 0.25
STORAGE_SECONDS: Final = 0.25
SERVER_SECONDS: Final = 0.25
LEASE_SECONDS: Final = 0.2
SERIES_SECONDS: Final = 0.5
PROBE_SECONDS_MAX: Final = 60.0
# Number of requests of any sender that must follow each other.
SUSPENSION_REQUESTS: Final = 2  # the tenant's patch, the commit
# The tenant's patch, the commit, the template read, a pod created and bound, its status by the
# kubelet, its token, the token's review, the commit, the tenant's get.
START_REQUESTS: Final = 10
BLOCK: Final = bytes(64 << 10)


@dataclass(slots=True)
class Probe:
    """Latencies of one kind of request, in seconds."""

    name: str
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def measure(self, work: Any) -> None:
        """Run one request and record its latency or its error."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_SECONDS_MAX):
                await work()
        except (OSError, TimeoutError, ApiError, TestbedError, threefs.ThreeFSError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")
        else:
            self.seconds.append(time.monotonic() - started)


@dataclass(slots=True)
class Lease:
    """The operator's Lease."""

    holders: set[str] = field(default_factory=set)
    transitions: set[int] = field(default_factory=set)
    renewals: set[str] = field(default_factory=set)


class Probes:
    """The requests of one phase; `run` sends them for a given time and awaits all answers."""

    def __init__(
        self, testbed: Testbed, api: Api, simulator: NodeSimulator, webhook: int, storage: Path
    ) -> None:
        self.server = Probe("ConfigMap changed, without Fire-Flyer")
        self.order_limit = Probe(f"  {SUSPENSION_REQUESTS} times in a row")
        self.start_limit = Probe(f"  {START_REQUESTS} times in a row")
        self.webhook = Probe("pod admitted by the webhook")
        self.order = Probe("suspension at the job's sidecars")
        self.start = Probe("job bound and running again")
        self.write = Probe("64 KiB written, read, removed in 3FS")
        self.connect = Probe("client of 3FS connected")
        self.lease = Lease()
        self._changes = 0
        self._testbed, self._api, self._simulator = testbed, api, simulator
        self._port, self._storage = webhook, storage
        self._tls = ssl.create_default_context()
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    @property
    def all(self) -> list[Probe]:
        """In the order of the table."""
        return [
            self.server, self.order_limit, self.start_limit, self.webhook, self.order, self.start,
            self.write, self.connect,
        ]  # fmt: skip

    async def run(self, seconds: float, ended: Callable[[], bool] = lambda: False) -> None:
        """Repeat each request at its own interval."""
        ends_at = time.monotonic() + seconds

        async def repeat(work: Any, pause: float) -> None:
            while time.monotonic() < ends_at and not ended():
                await work()
                await asyncio.sleep(pause)

        client = await asyncio.to_thread(threefs.connect, self._storage)
        try:
            await asyncio.gather(
                repeat(lambda: self.webhook.measure(self._review), WEBHOOK_SECONDS),
                repeat(lambda: self._files(client), STORAGE_SECONDS),
                repeat(lambda: self.connect.measure(self._connect), 2 * STORAGE_SECONDS),
                repeat(self._suspend, 0.5),
                repeat(lambda: self._changes_in_a_row(self.server, 1), SERVER_SECONDS),
                repeat(
                    lambda: self._changes_in_a_row(self.order_limit, SUSPENSION_REQUESTS),
                    SERIES_SECONDS,
                ),
                repeat(
                    lambda: self._changes_in_a_row(self.start_limit, START_REQUESTS), SERIES_SECONDS
                ),
                repeat(self._read_lease, LEASE_SECONDS),
            )
        finally:
            await asyncio.to_thread(client.close)

    async def _review(self) -> None:
        """Call the webhook on a new connection; the API server would reuse one."""
        body = json.dumps(REVIEW).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls)
        try:
            head = f"POST /inject HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            line = await reader.readline()
            if b" 200 " not in line:
                raise OSError(f"the webhook answered {line!r}")
        finally:
            writer.transport.abort()

    async def _change(self, name: str) -> None:
        """Change a ConfigMap: the share of the API server and etcd in the other latencies."""
        self._changes += 1
        data = {"data": {"changes": str(self._changes)}}
        try:
            await self._api.merge(CONFIG_MAPS, name, data, NAMESPACE)
        except NotFoundError:
            await self._api.create(CONFIG_MAPS, {"metadata": {"name": name}}, NAMESPACE)

    async def _changes_in_a_row(self, probe: Probe, count: int) -> None:
        async def work() -> None:
            for _ in range(count):
                await self._change(f"probe-{count}")

        await probe.measure(work)

    async def _files(self, client: threefs.Client) -> None:
        def work() -> None:
            client.write_file("/probe", BLOCK)
            if client.read_file("/probe") != BLOCK:
                raise OSError("read other bytes than written")
            client.remove("/probe")

        await self.write.measure(lambda: asyncio.to_thread(work))

    async def _connect(self) -> None:
        def work() -> None:
            with threefs.connect(self._storage) as client:
                client.stat("/")

        await asyncio.to_thread(work)

    async def _suspend(self) -> None:
        """Suspend the job, and resume it once its pods have ended."""
        api, simulator = self._api, self._simulator
        simulator.suspended.clear()

        async def suspend() -> None:
            await api.merge(FLYERJOBS, JOB, {"spec": {"suspend": True}}, NAMESPACE)
            await self._until(lambda: bool(simulator.suspended), 0.002)

        async def resume() -> None:
            await api.merge(FLYERJOBS, JOB, {"spec": {"suspend": False}}, NAMESPACE)
            await self._until_phase("Running", 0.02)

        await self.order.measure(suspend)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_SECONDS_MAX):
                await self._until_phase("Suspended", 0.05)
        await self.start.measure(resume)

    async def _until(self, condition: Callable[[], bool], pause: float) -> None:
        while True:
            if condition():
                return
            await asyncio.sleep(pause)

    async def _until_phase(self, phase: str, pause: float) -> None:
        while True:
            if (await self._phase()) == phase:
                return
            await asyncio.sleep(pause)

    async def _phase(self) -> str:
        job = await self._api.get(FLYERJOBS, JOB, NAMESPACE)
        return str((job.get("status") or {}).get("phase"))

    async def _read_lease(self) -> None:
        spec = (await self._testbed.api.get(LEASES, "flyer-operator", SYSTEM))["spec"]
        self.lease.holders.add(str(spec["holderIdentity"]))
        self.lease.transitions.add(int(spec.get("leaseTransitions") or 0))
        self.lease.renewals.add(str(spec["renewTime"]))
