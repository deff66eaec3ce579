"""Benchmark of one tenant's request latency while other clients flood every port.

A real API server, the operator, the webhook and 3FS run as processes. Rounds alternate between a
quiet phase and an attack: 160 silent connections to every port, 1,024 to the gateway, from eight
addresses, and posts of 8 MiB at fifty a second to the webhook, the metrics and the gateway. Then
3,000 FlyerJobs with 256 KiB of annotations, which are refused, and 3,000 with 64 KiB, which are
accepted (kubectl's own copy of the manifest). Every request has a tenant's rights and priority
level at the API server; the latency of a ConfigMap there is the part that no operator can avoid.

    python -m bench.hostile [--seconds 20] [--rounds 2] [--jobs 3000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flyer.kube.apiserver import Api, Limits, find_access
from flyer.kube.apiserver.resources import FLYERJOBS
from flyer.kube.gateway import certificates_of, renewed

from bench.hostile.probes import JOB, Lease, Probe, Probes
from bench.report import OUTPUT, ROOT, machine, peak_bytes, say, utc, write_json
from bench.sched.loads import NAMESPACE, flyer_job
from bench.sched.node_simulator import NodeSimulator
from bench.sched.testbed import Testbed, TestbedError
from bench.storage_load import serving
from testcluster.handle import Cluster
from testcluster.processes import STATE_VARIABLE
from testcluster.state import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

LATE_SECONDS: Final = 0.1
OTHER_USER: Final = "other-user"
START_SECONDS_MAX: Final = 30.0
JOBS_SECONDS_MAX: Final = 600.0
LARGE_BYTES: Final = (256 << 10) - 4096  # Kubernetes accepts 256 KiB in total
KEPT, KEPT_BYTES_MAX = "kubectl.kubernetes.io/last-applied-configuration", 64 << 10
SILENT, SILENT_AT_THE_GATEWAY = 160, 1024


@contextlib.contextmanager
def webhook(testbed: Testbed) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """The injection webhook: its process, its port and that of its metrics."""
    certs = certificates_of(renewed(None, ["localhost"], datetime.now(UTC)))
    folder = testbed.folder / "webhook"
    folder.mkdir()
    for name, text in (
        ("ca.crt", certs.bundle), ("tls.crt", certs.certificate), ("tls.key", certs.key),
    ):  # fmt: skip
        (folder / name).write_text(text)
    ports = free_ports(("webhook", "webhook-metrics"))
    port, metrics = ports["webhook"], ports["webhook-metrics"]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "flyer.kube.injection", f"--port={port}", "--host=127.0.0.1",
            f"--metrics-port={metrics}", f"--certificates-folder={folder}",
        ],
        env=os.environ | {STATE_VARIABLE: str(testbed.folder)},
    )  # fmt: skip
    try:
        yield process, port, metrics
    finally:
        process.kill()
        process.wait()


def listening(pids: list[int]) -> list[int]:
    """TCP ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted(
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    )


def peak_mib(pid: int) -> float:
    """Sum of the peak resident memory of a process and of each of its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return peak_bytes(pid) / (1 << 20) + sum(peak_mib(int(child)) for child in children)


def idle(testbed: Testbed, module: str, *arguments: str) -> Awaitable[asyncio.subprocess.Process]:
    """Start an attacker at idle priority: real attackers do not share the server's processor."""
    return asyncio.create_subprocess_exec(
        "chrt", "--idle", "0", sys.executable, "-m", module, *arguments, cwd=ROOT,
        env=os.environ | {STATE_VARIABLE: str(testbed.folder)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def attack(testbed: Testbed, plan: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """A flood; its counters are in the dictionary afterwards."""
    process = await idle(testbed, "bench.hostile.flood", json.dumps(plan))
    counters: dict[str, Any] = {}
    started = asyncio.Event()

    async def poll() -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            counters.update(json.loads(line))
            started.set()

    reading = asyncio.create_task(poll())
    try:
        async with asyncio.timeout(START_SECONDS_MAX):
            await started.wait()
        yield counters
    finally:
        process.kill()
        await process.wait()
        await reading


def user(testbed: Testbed, name: str, namespace: str, *rights: str) -> Path:
    """The kubeconfig of a service account with these rights ("VERB,VERB RESOURCE") there."""
    cluster = Cluster(testbed.state)
    namespace_flag = f"--namespace={namespace}"
    cluster.kubectl("create", "serviceaccount", name, namespace_flag)
    for number, right in enumerate(rights):
        verbs, resource = right.split()
        role = f"{name}-{number}"
        cluster.kubectl(
            "create", "role", role, namespace_flag, f"--verb={verbs}", f"--resource={resource}"
        )
        account = f"--serviceaccount={namespace}:{name}"
        cluster.kubectl("create", "rolebinding", role, namespace_flag, f"--role={role}", account)
    config = json.loads(testbed.state.kubeconfig.read_text())
    token = cluster.kubectl("create", "token", name, namespace_flag, "--duration=24h")
    config["users"][0]["user"] = {"token": token.strip()}
    path = testbed.folder / f"{name}.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config))
    return path


def other_user(testbed: Testbed) -> Path:
    """A user who may create FlyerJobs in another namespace."""
    Cluster(testbed.state).kubectl("create", "namespace", OTHER_USER)
    return user(testbed, OTHER_USER, OTHER_USER, "create flyerjobs.fireflyer.dev")


@contextlib.asynccontextmanager
async def tenant(testbed: Testbed) -> AsyncIterator[Api]:
    """A user who may only change jobs and ConfigMaps in the loads' namespace."""
    rights = ("get,patch flyerjobs.fireflyer.dev", "create,patch configmaps")
    access = await asyncio.to_thread(user, testbed, "tenant", NAMESPACE, *rights)
    limits = Limits(answer_seconds=60.0, call_seconds=60.0)
    api = Api(await find_access(str(access)), agent="bench-tenant", limits=limits)
    try:
        yield api
    finally:
        await api.close()


async def large_jobs(
    testbed: Testbed, access: Path, count: int, annotation: str, size: int
) -> dict[str, Any]:
    """Create suspended jobs with an annotation of this size; count accepted and refused ones."""
    process = await idle(
        testbed,
        "bench.hostile.large_jobs",
        str(access),
        OTHER_USER,
        str(count),
        annotation,
        str(size),
    )
    try:
        async with asyncio.timeout(JOBS_SECONDS_MAX):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise TestbedError(
            f"{count} jobs were not created within {JOBS_SECONDS_MAX:.0f} s"
        ) from None
    return dict(json.loads(output))


def row(name: str, quiet: Probe, attacked: Probe) -> dict[str, Any]:
    """One probe's figures, in milliseconds."""

    def ms(values: list[float], share: float) -> float:
        ranked = sorted(values)
        return round(1e3 * ranked[min(int(share * len(ranked)), len(ranked) - 1)], 1)

    result: dict[str, Any] = {
        "name": name, "error_count": len(attacked.errors), "errors": attacked.errors[:3],
    }  # fmt: skip
    for label, probe in (("quiet", quiet), ("attacked", attacked)):
        if probe.seconds:
            result[label] = {
                "requests": len(probe.seconds),
                "median": ms(probe.seconds, 0.5),
                "p99": ms(probe.seconds, 0.99),
                "max": ms(probe.seconds, 1.0),
            }
    if quiet.seconds and attacked.seconds:
        late = {
            key: round(result["attacked"][key] - result["quiet"][key], 1)
            for key in ("median", "p99")
        }
        result |= {"late": late, "good": max(late.values()) <= 1e3 * LATE_SECONDS}
    return result


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Formats the table for the terminal."""
    lines = [f"{'milliseconds: median / p99 / most':<40}{'quiet':>18}{'attacked':>24}{'late':>14}"]
    for probe in rows:
        quiet, attacked, late = (
            " / ".join(f"{part[key]:.0f}" for key in ("median", "p99", "max") if key in part)
            for part in (probe.get(name, {}) for name in ("quiet", "attacked", "late"))
        )
        verdict = "" if probe.get("good", True) else " NO"
        errors = f" {probe['error_count']} errors" if probe["error_count"] else ""
        name = probe["name"]
        lines.append(f"{name:<40}{quiet:>18}{attacked:>24}{late:>14}{verdict}{errors}")
    return lines


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases."""
    say("starting a control plane, the operator, the webhook and 3FS")
    testbed = Testbed(arguments.folder, nodes=8, nodes_per_leaf=4)
    async with testbed, NodeSimulator(testbed) as simulator, tenant(testbed) as api:
        leader = await testbed.start_leader()
        with webhook(testbed) as (hook, port, metrics), serving(testbed.folder) as storage:
            await simulator.send("cooperate", "go")
            await testbed.create_all(FLYERJOBS, [flyer_job(JOB, 2)])
            await simulator.until_running(2)
            processes = {"operator": leader.process.pid, "webhook": hook.pid, **storage.pids}
            phases = {
                name: Probes(testbed, api, simulator, port, storage.file)
                for name in ("quiet", "attacked", "refused", "taken")
            }
            ports = {port, metrics, leader.metrics_port, *listening(list(storage.pids.values()))}
            silent = dict.fromkeys(ports, SILENT) | {leader.gateway_port: SILENT_AT_THE_GATEWAY}
            plan: dict[str, Any] = {
                "silent": silent,
                "posts": [
                    (port, "/inject", True), (leader.metrics_port, "/metrics", False),
                    (metrics, "/metrics", False), (leader.gateway_port, "/", True),
                ],
            }  # fmt: skip
            before = {name: peak_mib(pid) for name, pid in processes.items()}
            attacks = []
            for number in range(arguments.rounds):
                say(f"round {number + 1} of {arguments.rounds}: quiet")
                await phases["quiet"].run(arguments.seconds)
                say(f"round {number + 1} of {arguments.rounds}: silent connections and posts")
                async with attack(testbed, plan) as counters:
                    await phases["attacked"].run(arguments.seconds)
                attacks.append(counters)
            flooded = {name: peak_mib(pid) for name, pid in processes.items()}
            large = await _with_jobs(arguments, testbed, phases)
            after = {name: peak_mib(pid) for name, pid in processes.items()}
    quiet = phases["quiet"].all
    rows = {
        name: [row(first.name, first, other) for first, other in zip(quiet, phase.all, strict=True)]
        for name, phase in phases.items()
        if name != "quiet"
    }
    return {
        "connections and posts": rows["attacked"],
        "jobs that are refused": rows["refused"],
        "jobs that are taken": rows["taken"],
        "attacks": attacks,
        "jobs": large,
        "lease": {name: _lease(first.lease) for name, first in phases.items()},
        "peak MiB": {
            name: {"quiet": round(before[name]), "flooded": round(flooded[name]),
                   "with jobs": round(after[name])}
            for name in processes
        },
        "ports": {"silent": {str(key): value for key, value in plan["silent"].items()}},
        "config": {
            **machine(), "load": [round(load, 1) for load in os.getloadavg()], "time": utc(),
            "seconds": arguments.seconds, "rounds": arguments.rounds,
        },
    }  # fmt: skip


async def _with_jobs(
    arguments: argparse.Namespace, testbed: Testbed, phases: dict[str, Probes]
) -> dict[str, dict[str, Any]]:
    access = await asyncio.to_thread(other_user, testbed)
    created = {}
    for name, annotation, size in (
        ("refused", "example.com/text", LARGE_BYTES), ("taken", KEPT, KEPT_BYTES_MAX),
    ):  # fmt: skip
        say(f"{arguments.jobs:,} jobs with {size >> 10} KiB of annotations")
        creating = asyncio.create_task(
            large_jobs(testbed, access, arguments.jobs, annotation, size)
        )
        # While the jobs are being created.
        await phases[name].run(JOBS_SECONDS_MAX, creating.done)
        created[name] = await creating
    return created


def _lease(lease: Lease) -> dict[str, int]:
    return {
        "holders": len(lease.holders),
        "transitions": max(lease.transitions) - min(lease.transitions),
        "renewals": len(lease.renewals),
    }


def main() -> int:
    """Measure, print tables, write the JSON. 1: something could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hostile", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--folder", type=Path, default=OUTPUT / "hostile-cluster")
    parser.add_argument("--output", type=Path, default=OUTPUT / "hostile.json")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        report = asyncio.run(measure(arguments))
    except TestbedError as error:
        print(f"bench-hostile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench-hostile: interrupted; the cluster is removed", file=sys.stderr)
        return 130
    write_json(arguments.output, report)
    print("160 silent connections a port, 1,024 at the gateway, posts of 8 MiB")
    print("\n".join(table(report["connections and posts"])))
    for name in ("refused", "taken"):
        counts = report["jobs"][name]
        print(f"large jobs: {counts['refused']:,} refused, {counts['taken']:,} taken")
        print("\n".join(table(report[f"jobs that are {name}"])))
    print("peak MiB (quiet, flooded, with jobs): " + ", ".join(
        f"{name} {'/'.join(str(peak) for peak in peaks.values())}"
        for name, peaks in report["peak MiB"].items()
    ))  # fmt: skip
    print(f"Lease: {report['lease']}")
    print(f"written to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
