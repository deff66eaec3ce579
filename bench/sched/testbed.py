"""Testbed: a real control plane, kwok nodes and the operator as a process.

All processes carry the cluster's mark in their environment, so that `down` finds them after any
interruption.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from flyer.kube.apiserver import Api, Limits, find_access
from flyer.kube.apiserver.errors import ApiError, NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS, NAMESPACES, NODES, PODS, Resource
from flyer.kube.lease import LEASE_SECONDS, RETRY_SHARE

from bench import report
from bench.report import ROOT
from bench.sched.audit import POLICY, AuditLog
from bench.sched.costs import Costs
from bench.sched.loads import NAMESPACE
from charts import helm
from programs import binaries
from testcluster import control_plane, kwok
from testcluster.down import down, remove
from testcluster.handle import Cluster
from testcluster.processes import STATE_VARIABLE, Process
from testcluster.state import State, free_ports, locked

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

__all__ = ["PODGROUPS", "SYSTEM", "TAKEOVER_SECONDS", "Operator", "Testbed", "TestbedError"]

SYSTEM: Final = "fireflyer-system"
ACCOUNT: Final = "flyer-operator"
PODGROUPS: Final = Resource("scheduling.k8s.io", "v1alpha2", "podgroups")
_PORTS: Final = (
    "etcd", "etcd-peer", control_plane.API_SERVER, control_plane.CONTROLLER_MANAGER,
    control_plane.SCHEDULER, "gateway-0", "metrics-0", "gateway-1", "metrics-1",
)  # fmt: skip
GANG_FEATURES: Final = (
    "GenericWorkload=true",
    "GangScheduling=true",
    "TopologyAwareWorkloadScheduling=true",
)
# Its own default of 50 requests a second would be measured instead of it.
PEER_CLIENT: Final = ("--kube-api-qps=5000", "--kube-api-burst=5000")
READY_SECONDS: Final = 120.0
TAKEOVER_SECONDS: Final = LEASE_SECONDS * (1 + RETRY_SHARE) + 1.0
"""Goal for the time between a leader's kill and its successor: the Lease expires, the successor
tries to take it, and one second passes until it serves."""
EMPTY_SECONDS: Final = 120.0
SETTLE_SECONDS: Final = 4.5
"""Time within which events, counts and verdicts are written after their cause."""
IN_FLIGHT: Final = 64
"""Concurrent calls that create loads."""


class TestbedError(Exception):
    """The cluster did not reach a state that a measurement needs."""


@dataclass(slots=True)
class Operator:
    """One `flyer-operator`."""

    number: int
    process: subprocess.Popen[bytes]
    metrics_port: int
    gateway_port: int
    log: Path
    started_at: float = field(default_factory=time.time)

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of its HTTP endpoint; 0: no answer."""
        url = f"http://127.0.0.1:{self.metrics_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""
        except OSError:
            return 0, ""

    def leads(self) -> bool:
        """Whether it leads and serves."""
        if self.process.poll() is not None:
            words = self.log.read_text(errors="replace").strip().splitlines()[-5:]
            raise TestbedError(
                f"flyer-operator ended with status {self.process.returncode}: {words}"
            )
        return self.get("/leaderz")[0] == 200

    def peak_bytes(self) -> int:
        """Its peak resident memory."""
        return report.peak_bytes(self.process.pid)

    def cpu_seconds(self) -> float:
        """Processor time so far, user and system."""
        return report.cpu_seconds(self.process.pid)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal it and wait for its end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)


class Testbed:
    """One cluster; `async with` starts and removes it."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        nodes_per_leaf: int,
        profile: Path | None = None,
        server_profiles: Path | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.nodes = nodes
        self.nodes_per_leaf = nodes_per_leaf
        self.operators: list[Operator] = []
        self.state: State
        self.api: Api
        self.audit = AuditLog(self.folder / "audit.log")
        self.costs = Costs(self, server_profiles)
        self._profile = profile
        self._flags = control_plane.Flags()
        self._peer: Process | None = None

    async def __aenter__(self) -> Self:
        # A thread continues when its caller is interrupted: its processes must be removed, too.
        starting = asyncio.create_task(asyncio.to_thread(self._start))
        try:
            await asyncio.shield(starting)
            await self._open()
        except BaseException:
            await asyncio.wait({starting})
            await asyncio.to_thread(self._keep_logs)
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            await asyncio.to_thread(self._keep_logs)
        await self._close()

    def _start(self) -> None:
        programs = [control_plane.API_SERVER, control_plane.SCHEDULER, "kubectl", kwok.KWOK]
        binaries.require(*programs, control_plane.CONTROLLER_MANAGER)
        with locked(self.folder):
            remove(self.folder)
            self.state = State(self.folder, light=True, ports=free_ports(_PORTS))
            self.state.save()
            policy = self.folder / "audit.json"
            policy.write_text(json.dumps(POLICY))
            self._flags = control_plane.Flags(
                features=GANG_FEATURES,
                api_server=(
                    "--runtime-config=scheduling.k8s.io/v1alpha2=true",
                    f"--audit-policy-file={policy}",
                    f"--audit-log-path={self.folder / 'audit.log'}",
                    "--delete-collection-workers=8",
                    "--profiling=true",
                ),
                # kwok renews leases rarely; nodes fail only when a benchmark makes them fail.
                controllers=(
                    "--node-monitor-grace-period=2h",
                    # New nodes carry a taint until it takes that away: minutes at its usual 20/s.
                    "--kube-api-qps=500",
                    "--kube-api-burst=1000",
                    "--terminated-pod-gc-threshold=0",  # a cold start has 18,000 such pods
                    f"--feature-gates={','.join(GANG_FEATURES)}",
                ),
            )
            control_plane.start(self.state, controllers=True, scheduler=False, flags=self._flags)
            if self.nodes:
                kwok.add(Cluster(self.state), self.nodes, self.nodes_per_leaf)
        cluster = Cluster(self.state)
        cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        cluster.kubectl(
            "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all", deadline_s=70
        )
        cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "policies"))
        for name in (SYSTEM, NAMESPACE):
            cluster.kubectl("create", "namespace", name)
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=_flow_control())
        # One broad role in place of the chart's: the cost is the same for any role.
        cluster.kubectl(
            "create", "clusterrolebinding", "operator", "--clusterrole=cluster-admin",
            f"--user=system:serviceaccount:{SYSTEM}:{ACCOUNT}",
        )  # fmt: skip
        cluster.kubectl("create", "serviceaccount", ACCOUNT, f"--namespace={SYSTEM}")
        # As in a pod: a token costs the server less than a certificate.
        token = cluster.kubectl(
            "create", "token", ACCOUNT, f"--namespace={SYSTEM}", "--duration=24h"
        )
        config = json.loads(self.state.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token.strip()}
        self.operator_kubeconfig.touch(mode=0o600)
        self.operator_kubeconfig.write_text(json.dumps(config))

    @property
    def operator_kubeconfig(self) -> Path:
        """Kubeconfig of the operator's service account."""
        return self.folder / "operator.kubeconfig"

    async def _open(self) -> None:
        access = await find_access(str(self.state.kubeconfig))
        # Deleting hundreds of objects is one call.
        limits = Limits(concurrency_max=IN_FLIGHT, answer_seconds=60.0, call_seconds=120.0)
        self.api = Api(access, agent="bench", limits=limits)
        await self.all_ready()
        await self.until("the namespace's account", self._has_account)

    @property
    def logs(self) -> Path:
        """Where the logs of a run that failed are kept; the cluster's own folder is removed."""
        return self.folder.with_name(f"{self.folder.name}-logs")

    def _keep_logs(self) -> None:
        shutil.rmtree(self.logs, ignore_errors=True)
        with contextlib.suppress(OSError):
            shutil.copytree(self.folder / "logs", self.logs)
            shutil.copy(self.folder / "audit.log", self.logs)

    async def _close(self) -> None:
        for operator in self.operators:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                operator.end(signal.SIGINT if self._profile else signal.SIGKILL)
        if hasattr(self, "api"):
            await self.api.close()
        await asyncio.to_thread(down, self.folder)

    async def _nodes_ready(self) -> bool:
        return sum(map(_is_ready, await self.api.list(NODES))) == self.nodes

    async def _has_account(self) -> bool:
        accounts = Resource("", "v1", "serviceaccounts")
        try:
            await self.api.get(accounts, "default", NAMESPACE)
            await self.api.get(NAMESPACES, SYSTEM)
        except NotFoundError:
            return False
        return True

    # -- processes -----------------------------------------------------------------------------

    def start_operator(self, number: int = 0, *, source: Path | None = None) -> Operator:
        """One more process; `number` selects its ports.

        `source`: the tree whose operator it is, instead of this one.
        """
        ports = self.state.ports
        gateway, metrics = ports[f"gateway-{number}"], ports[f"metrics-{number}"]
        log = self.state.log(f"operator-{number}")
        command = [sys.executable]
        if self._profile is not None:
            command += ["-m", "cProfile", "-o", f"{self._profile}.{len(self.operators)}"]
        command += [
            "-m", "flyer.kube", f"--kubeconfig={self.operator_kubeconfig}",
            "--gateway-host=127.0.0.1", f"--gateway-port={gateway}",
            f"--gateway-endpoint=127.0.0.1:{gateway}", f"--metrics-port={metrics}",
            f"--identity=operator-{len(self.operators)}", "--log-level=warning",
        ]  # fmt: skip
        paths = {} if source is None else {"PYTHONPATH": str(source / "operator" / "src")}
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=os.environ | paths | {STATE_VARIABLE: str(self.folder)},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        operator = Operator(number, process, metrics, gateway, log)
        self.operators.append(operator)
        return operator

    async def start_leader(self) -> Operator:
        """An operator that leads on return."""
        operator = self.start_operator()
        await self.until("the operator leads", operator.leads)
        await asyncio.sleep(SETTLE_SECONDS)
        return operator

    async def succeed(
        self,
        leader: Operator,
        before: Callable[[], Awaitable[None]] | None = None,
        *,
        source: Path | None = None,
    ) -> float:
        """Kill the leader, with a second process waiting: seconds until that one serves."""
        successor = self.start_operator(1 - leader.number, source=source)
        await self.until("the successor is ready", lambda: successor.get("/readyz")[0] == 200)
        await asyncio.sleep(SETTLE_SECONDS)
        if before is not None:
            await before()
        killed_at = time.monotonic()
        leader.end(signal.SIGKILL)
        while not await asyncio.to_thread(successor.leads):
            if time.monotonic() > killed_at + READY_SECONDS:
                raise TestbedError(f"no successor leads; logs are in {self.logs}")
            await asyncio.sleep(0.01)
        return time.monotonic() - killed_at

    async def start_peer_once(self) -> None:
        """kube-scheduler, ready on return. It runs only while it is measured."""
        arguments = (*PEER_CLIENT, "--logging-format=text")
        process = control_plane.scheduler_process(self.state, self._flags, arguments)
        await asyncio.to_thread(process.start)
        port = self.state.ports[control_plane.SCHEDULER]

        def ready() -> bool:
            if not process.pids():
                raise TestbedError(str(process.failure("ended")))
            return _answers(f"https://127.0.0.1:{port}/readyz")

        await self.until("kube-scheduler is ready", ready)
        self._peer = process

    async def end_peer(self) -> None:
        """Stop kube-scheduler and wait for its exit."""
        if self._peer is not None:
            await asyncio.to_thread(self._peer.kill)
            self._peer = None

    # -- waiting and cleaning ------------------------------------------------------------------

    async def until(
        self, description: str, probe: Callable[[], Any], seconds: float = READY_SECONDS
    ) -> None:
        """Wait until the probe succeeds; a TestbedError names the missing condition."""
        ends_at = time.monotonic() + seconds
        while True:
            is_async = asyncio.iscoroutinefunction(probe)
            if await (probe() if is_async else asyncio.to_thread(probe)):
                return
            if time.monotonic() > ends_at:
                raise TestbedError(
                    f"not within {seconds:g} s: {description}; logs are in {self.logs}"
                )
            await asyncio.sleep(0.1)

    async def all_ready(self) -> None:
        """Every node is ready."""
        await self.until("nodes are ready", self._nodes_ready)

    async def empty(self) -> None:
        """Remove every job and pod, and wait until all clients have observed it."""
        for kind in (FLYERJOBS, PODGROUPS):
            await self.api.delete_all(kind, NAMESPACE)

        async def none_remain() -> bool:
            with contextlib.suppress(ApiError):
                await self.api.delete_all(PODS, NAMESPACE, gracePeriodSeconds="0")
            pods = await self.api.list(PODS, NAMESPACE)
            jobs = await self.api.list(FLYERJOBS, NAMESPACE)
            groups = await self.api.list(PODGROUPS, NAMESPACE)
            return not pods and not jobs and not groups

        await self.until("pods and jobs are gone", none_remain, EMPTY_SECONDS)
        if self.operators and self.operators[-1].process.poll() is None:
            operator = self.operators[-1]
            await self.until("the operator sees an empty cluster", lambda: _has_none(operator))
        await asyncio.sleep(SETTLE_SECONDS)

    async def create_all(self, resource: Resource, values: list[dict[str, Any]]) -> None:
        """Create objects concurrently."""
        await asyncio.gather(*(self.api.create(resource, value, NAMESPACE) for value in values))


def _flow_control() -> str:
    """The chart's shares of the API server."""
    chart = ROOT / "charts" / "fire-flyer"
    command = [
        helm.find(), "template", "fire-flyer", str(chart), f"--namespace={SYSTEM}",
        "--set=images.registry=none,images.allowTags=true",
        "--show-only=templates/flow-control.yaml",
    ]  # fmt: skip
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        timeout=READY_SECONDS,
    ).stdout  # fmt: skip


def _is_ready(node: dict[str, Any]) -> bool:
    taints = [taint["key"] for taint in node["spec"].get("taints") or ()]
    conditions = node["status"].get("conditions") or ()
    ready = any(
        (condition["type"], condition["status"]) == ("Ready", "True") for condition in conditions
    )
    return ready and taints == ["fireflyer.dev/dedicated"]


def _has_none(operator: Operator) -> bool:
    text = operator.get("/metrics")[1]
    remaining = [
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(("flyer_gang_nodes", "flyer_jobs{"))
    ]
    return bool(text) and not any(remaining)


def _answers(url: str) -> bool:
    import ssl

    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as response:
            return bool(response.status == 200)
    except OSError:
        return False
