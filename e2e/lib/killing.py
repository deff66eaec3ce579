"""Fault injection: a proxy kills the chart's operator at every write of a job's lifecycle.

Its pods use another address of the API server: this machine's on the cluster's bridge, where the
proxy has a certificate of the cluster's authority. They authenticate with their tokens, which the
proxy forwards. kopf uses the API server's DNS name and bypasses the proxy: the handlers' writes to
quotas and topologies are not part of a job's lifecycle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyer.kube.apiserver import Access

from e2e.lib.chart import NAMESPACE
from fakekube.real_server.proxy import Proxy
from fakekube.real_server.reaper import Reaper
from testcluster.handle import wait_for
from testcluster.pki import Authority
from testcluster.processes import wait_gone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from fakekube.apiserver.faults import Call
    from fakekube.real_server.reaper import Key
    from testcluster.handle import Cluster

__all__ = ["Killed", "behind_proxy", "write_key"]

AGENT = "flyer-operator/"
DEPLOYMENT = "flyer-operator"
START_SECONDS = 120.0
DEATH_SECONDS = 20.0
# Shorter than the chart's Lease: most of a scenario's time is spent waiting until it expires.
LEASE = {
    "FLYER_LEASE_SECONDS": "3",
    "FLYER_LEASE_RENEW_SECONDS": "2",
    "FLYER_LEASE_RETRY_SECONDS": "0.4",
}


class Killed:
    """The kills so far. Writes for which `is_spared` is true kill no process."""

    def __init__(self, is_spared: Callable[[Key], bool]) -> None:
        def key_of(call: Call, body: bytes) -> Key | None:
            key = write_key(call, body)
            return None if key is None or is_spared(key) else key

        self.reaper = Reaper(AGENT, key_of, self._kill)
        self.failure: Exception | None = None

    async def _kill(self, agent: str) -> None:
        """Sends SIGKILL to the process with this identity: its pod's name and a number."""
        pod = agent.removeprefix(AGENT).rpartition("-")[0]
        try:
            await asyncio.to_thread(_kill_process_of, pod)
        except (AssertionError, OSError) as error:  # only the test reads it
            self.failure = error

    @property
    def kinds(self) -> Counter[str]:
        """The number of kills for each kind of write."""
        return Counter(" ".join(key[:2]) for key in self.reaper.deaths)


def write_key(call: Call, body: bytes) -> Key | None:
    """The identity of an operator's write: the same when a successor repeats it.

    Epochs, times, versions and displayed numbers are excluded. Writes to the Lease elect a leader
    and are not counted.
    """
    if call.resource == "leases":
        return None
    value = json.loads(body) if body else {}
    kind, name = (call.verb, call.resource), call.name
    match kind:
        case ("create", "events"):
            return (*kind, value["regarding"]["name"], value["reason"])
        case ("patch", "events"):  # of an event series, whose name ends with its start time
            return (*kind, name.rpartition(".")[0])
        case ("create", "pods"):
            return (*kind, str(value["metadata"]["name"]))
        case ("update", "flyerjobs/status"):
            return (*kind, name, *_status_words(value["status"]))
        case ("patch", "flyerjobs/status") if isinstance(value, list):  # a JSON patch: a commit
            (status,) = [each["value"] for each in value if each["op"] == "add"]
            return ("update", call.resource, name, *_status_words(status))
        case ("patch", "flyertopologies/status" | "flyerjobs/status"):
            return (*kind, *sorted(value["status"]))
        case ("patch", "pods"):  # which pod leads
            return (*kind, str(value["metadata"]["labels"]))
    return (*kind, name)


def _status_words(status: dict[str, Any]) -> tuple[str, ...]:
    """The state from which the scheduler resumes."""
    history, checkpoint = status.get("history") or {}, status.get("checkpoint") or {}
    words = {
        "phase": status.get("phase"),
        "attempt": history.get("attempt", 0),
        "code": status.get("suspendCode", 0),
        "occupied": len(status.get("occupied") or ()),
        "saved": checkpoint.get("step"),
    }
    return tuple(f"{name} {word}" for name, word in words.items())


def _kill_process_of(pod: str) -> None:
    """Kills the container's first process, with which the kernel kills its child processes."""
    pids = set(_processes_of(pod))
    first = [pid for pid in pids if _parent(pid) not in pids]
    if len(first) != 1:
        raise AssertionError(f"{pod} has the first processes {first}, not one that could be killed")
    os.kill(first[0], signal.SIGKILL)
    if wait_gone(list(pids), DEATH_SECONDS):
        raise AssertionError(f"processes {pids} of {pod} live {DEATH_SECONDS:g} s after SIGKILL")


def _parent(pid: int) -> int:
    """Field 4 of proc_pid_stat(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _processes_of(pod: str) -> Iterator[int]:
    """Nodes are namespaces: this machine sees all of their processes."""
    mark = f"FLYER_POD_NAME={pod}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


@contextlib.asynccontextmanager
async def behind_proxy(cluster: Cluster) -> AsyncIterator[Proxy]:
    """Routes the operator through the proxy and restores its Deployment afterwards."""
    pki = cluster.state.folder / "pki"
    host = str(cluster.state.gateway)
    certificate = Authority(pki).issue("proxy", "proxy", hosts=[host])
    serves = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serves.load_cert_chain(certificate.certificate, certificate.key)
    access = Access(cluster.state.server, ssl_ca_cert=str(pki / "ca.crt"))
    deployment = await asyncio.to_thread(cluster.get, "deployment", DEPLOYMENT, NAMESPACE)
    replicas = int(deployment["spec"]["replicas"])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    before = list(container["env"])
    async with Proxy(access, host, serves) as proxy:
        env = {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": str(proxy.port),
            **LEASE,
        }
        other_variables = [variable for variable in before if variable["name"] not in env]
        added = [{"name": name, "value": value} for name, value in env.items()]
        try:
            await asyncio.to_thread(_restart_with, cluster, [*other_variables, *added], replicas)
            yield proxy
        finally:
            proxy.reaper = None
            await asyncio.to_thread(_restart_with, cluster, before, replicas)


def _restart_with(cluster: Cluster, env: list[dict[str, Any]], replicas: int) -> None:
    """Replaces all replicas together with this environment: a rollout would be sequential."""
    space = f"--namespace={NAMESPACE}"
    path = "/spec/template/spec/containers/0/env"
    patch = [{"op": "replace", "path": path, "value": env}]
    scale = ("scale", "deployment", DEPLOYMENT, space)
    cluster.kubectl(*scale, "--replicas=0")
    wait_for("the operator's end", lambda: not _pods(cluster), START_SECONDS)
    change = ("patch", "deployment", DEPLOYMENT, space, "--type=json")
    cluster.kubectl(*change, f"--patch={json.dumps(patch)}")
    cluster.kubectl(*scale, f"--replicas={replicas}")
    rollout = ("rollout", "status", f"deployment/{DEPLOYMENT}", space)
    cluster.kubectl(*rollout, f"--timeout={START_SECONDS:g}s", deadline_s=START_SECONDS + 10)


def _pods(cluster: Cluster) -> list[dict[str, Any]]:
    selector = "app.kubernetes.io/component=operator"
    return list(cluster.get("pods", namespace=NAMESPACE, selector=selector))
