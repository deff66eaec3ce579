"""The chart's operator is killed at every write of two jobs' lifecycles, on real kubelets.

Each distinct write is the last of its process: the API server performs it, the response is
withheld, and the process gets SIGKILL. Its replica takes over, and its container is restarted.
`test_killed_operator.py` does the same for reads too, in one process and with simulated nodes.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api.names import TOPOLOGY_NAME
from flyer.kube.apiserver import Api, find_access
from flyer.kube.apiserver.errors import NotFoundError
from flyer.kube.apiserver.resources import FLYERJOBS, FLYERTOPOLOGIES, PODS

from e2e.lib.jobs import job
from e2e.lib.killing import Killed, behind_proxy
from e2e.workloads import lockstep
from testcluster.handle import wait_for
from testcluster.measurements import record

if TYPE_CHECKING:
    from collections.abc import Callable

    from e2e.lib import chart
    from fakekube.real_server.reaper import Key

# Some fifty deaths, a Lease each; and the first test of a session installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1200)]

SCRIPT = Path(lockstep.__file__).read_text()
RUNS = "/runs"  # in the pods
STEPS, HELD_AT = 60, 30
PHASE_SECONDS = 300.0
KINDS = {
    "create pods",
    "create pods/binding",
    "create events",
    "delete pods",
    "update flyerjobs/status",
    "patch flyerjobs/status",  # a new leader's mark
    "patch flyerjobs",  # a deleted job is let go
    "patch flyertopologies/status",
    "patch pods",  # the Service selects the leader
}
GANGS = {"low": 2, "high": 1}  # attempts


def is_spared(key: Key) -> bool:
    """Commits that survive: a process killed at a commit could not be killed at its event."""
    reported = {"phase Running", "phase Succeeded"}
    return key[:3] == ("update", "flyerjobs/status", "high") and not reported.isdisjoint(key)


def gang(name: str, runs: Path) -> dict[str, Any]:
    """Two ranks on the two nodes of zone A; a deleted job stays until its nodes are empty."""
    own = f"{RUNS}/{name}"
    job_object = job(name, 2, SCRIPT, own, str(STEPS), nodeClass="a100", zone="A", priority=name)
    job_object["spec"]["collectives"] = {"inject": False}  # nothing is reduced
    # Longer than all deaths while it is asked to go.
    job_object["spec"]["preemption"] |= {
        "checkpointGracePeriod": "5m",
        "maxCheckpointGracePeriod": "10m",
    }
    job_object["metadata"]["finalizers"] = ["fireflyer.dev/release"]
    spec = job_object["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "runs", "hostPath": {"path": str(runs), "type": "Directory"}}]
    (ranks,) = spec["containers"]
    ranks["volumeMounts"] = [{"name": "runs", "mountPath": RUNS}]
    if name == "low":
        # A helper process outlives the ranks: pods do not end by themselves, but are deleted.
        words = f"until [ -e {own}/final.json ]; do sleep 0.2; done"
        spec["containers"].append({**ranks, "name": "helper", "command": ["sh", "-c", words]})
    return job_object


@dataclass
class Life:
    """State of the jobs, as the test observes it."""

    api: Api
    namespace: str
    killed: Killed

    async def status(self, name: str) -> dict[str, Any]:
        return dict((await self.api.get(FLYERJOBS, name, self.namespace)).get("status") or {})

    async def until(
        self, name: str, description: str, holds: Callable[[dict[str, Any]], object]
    ) -> Any:
        """Its status when that holds."""
        job_status: dict[str, Any] = {}
        try:
            async with asyncio.timeout(PHASE_SECONDS):
                while not holds(job_status := await self.status(name)):
                    assert self.killed.failure is None, self.killed.failure
                    history = job_status.get("history") or {}
                    assert history.get("attempt", 0) <= GANGS[name], (job_status, self.story())
                    assert not history.get("restarts"), (job_status, self.story())
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(
                f"{name}: not {description}: {job_status}\n{self.story()}"
            ) from None
        return job_status

    async def wait_deleted(self, name: str) -> None:
        """The object, and its pods."""
        await self.api.delete(FLYERJOBS, name, self.namespace)
        selector = f"fireflyer.dev/job={name}"
        try:
            async with asyncio.timeout(PHASE_SECONDS):
                while True:
                    try:
                        await self.status(name)
                    except NotFoundError:
                        if not await self.api.list(PODS, self.namespace, labelSelector=selector):
                            return
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"{name} is not gone\n{self.story()}") from None

    def story(self) -> str:
        """The killed processes and their writes."""
        deaths = self.killed.reaper.deaths.items()
        return "\n".join(f"{agent}: {' '.join(key)}" for key, agent in deaths)


async def test_the_operator_is_killed_at_every_write(
    release: chart.Release, namespace: str, tmp_path: Path
) -> None:
    cluster = release.cluster
    runs = tmp_path / "runs"
    for folder in (runs, *(runs / name for name in GANGS)):
        folder.mkdir()
        folder.chmod(0o777)  # for any user of the image
    (runs / "low" / "until").write_text(str(HELD_AT))
    access = await find_access(cluster.kubeconfig)
    async with behind_proxy(cluster) as proxy, Api(access, agent="test") as api:
        killed = Killed(is_spared)
        life = Life(api, namespace, killed)
        proxy.reaper = killed.reaper
        started_at = time.monotonic()
        await live(life, runs)
        seconds = time.monotonic() - started_at
        created_pods = {
            key[2]: n for key, n in killed.reaper.seen.items() if key[:2] == ("create", "pods")
        }
        topology = await api.get(FLYERTOPOLOGIES, TOPOLOGY_NAME)
        deaths = len(killed.reaper.deaths)
        await asyncio.to_thread(wait_for, "replicas", lambda: all_back(release, deaths), 120.0)
    print(f"{deaths} deaths in {seconds:.0f} s: {dict(killed.kinds)}\n{life.story()}")
    record("killed_replicas", "deaths", deaths)
    record("killed_replicas", "life_seconds", seconds, most=300)

    assert killed.failure is None
    assert set(killed.kinds) >= KINDS
    # Every expected pod was created and bound once, and each of these writes killed a process.
    assert len(created_pods) == 2 * sum(GANGS.values()), created_pods
    assert set(created_pods.values()) == {1}, created_pods
    assert killed.kinds["create pods"] == killed.kinds["create pods/binding"] == len(created_pods)
    assert not topology["status"].get("holder")
    # Every rank of every attempt started once, on a node without another rank.
    for name, attempts in GANGS.items():
        ranks = {f"started-{n}-{rank}" for n in range(1, attempts + 1) for rank in (0, 1)}
        assert {path.name for path in (runs / name).glob("started-*")} == ranks
        final = json.loads((runs / name / "final.json").read_text())
        assert final == {"state": lockstep.state_after(STEPS), "attempt": attempts}
    for rank in (0, 1):
        loaded = json.loads((runs / "low" / f"started-2-{rank}").read_text())
        assert loaded["step"] == HELD_AT, (
            "the checkpoint that it saved at the preemption, and not an older one"
        )


def all_back(release: chart.Release, deaths: int) -> bool:
    """Whether each process that was killed was started again by its kubelet, and is ready."""
    statuses = [
        container
        for pod in release.pods("operator")
        for container in pod["status"]["containerStatuses"]
    ]
    started = sum(int(container["restartCount"]) for container in statuses)
    return started >= deaths and all(container["ready"] for container in statuses)


async def live(life: Life, runs: Path) -> None:
    """The second job preempts the first one and ends; then the first one resumes and ends."""

    async def submit(name: str) -> None:
        await life.api.create(FLYERJOBS, gang(name, runs), life.namespace)

    await submit("low")
    await life.until(
        "low",
        f"at step {HELD_AT}",
        lambda it: (it.get("progress") or {}).get("step") == HELD_AT,
    )
    await submit("high")
    job_status = await life.until("low", "evicted", lambda it: it.get("eviction"))
    eviction = job_status["eviction"]
    assert (eviction["reason"], eviction["suspendCode"], eviction.get("lostSteps", 0)) == (
        "Preempted", 3, 0,
    ), eviction  # fmt: skip
    (runs / "low" / "until").unlink()
    for name, attempts in reversed(GANGS.items()):
        job_status = await life.until(
            name,
            "over, its nodes empty",
            lambda it: it.get("phase") in ("Succeeded", "Failed") and not it.get("occupied"),
        )
        assert job_status["phase"] == "Succeeded", job_status
        assert job_status["history"]["attempt"] == attempts
    for name in GANGS:
        await life.wait_deleted(name)
