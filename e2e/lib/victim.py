"""Victim tenant, whose running job and open file other tenants must not affect."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e.lib import volumes
from e2e.lib.chart import NAMESPACE
from e2e.lib.jobs import END_SECONDS, job, status, wait_phase, wait_step
from e2e.workloads import lockstep
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from e2e.lib import chart
    from testcluster.handle import Cluster

__all__ = ["Observation", "Victim"]

NAME = "steady"
STEPS = 10_000_000  # it runs until it is suspended
SCRIPT = Path(lockstep.__file__).read_text()
# Each line must be stored before the next; a write that fails leaves a gap.
WRITES = (
    "n=0; while :; do echo $n >> /volume/lines; sync /volume/lines; n=$((n+1)); sleep 0.2; done"
)
SHORT = """
import flyer.job
flyer.job.current().progress(1)
"""


@dataclass(frozen=True)
class Observation:
    """State that attacks must not change, and counters that must grow."""

    lease: tuple[str, int]
    """Holder of the operator's Lease, and its changes of holders."""
    restarts: dict[str, int]
    """Restarts of containers, by pod of the release."""
    job_restarts: int
    step: int
    lines: int


@dataclass(frozen=True)
class Victim:
    """The namespace of the tenant."""

    release: chart.Release
    namespace: str

    @property
    def cluster(self) -> Cluster:
        """The cluster of the release."""
        return self.release.cluster

    def start(self) -> None:
        """Start a gang of two nodes of zone A, and a pod on the shared node that writes lines."""
        gang = job(NAME, 2, SCRIPT, "/volume/run", str(STEPS), nodeClass="a100", zone="A")
        gang["spec"]["collectives"] = {"inject": False}  # nothing is reduced
        spec = gang["spec"]["template"]["spec"]
        spec["volumes"] = [{"name": "volume", "persistentVolumeClaim": {"claimName": "runs"}}]
        (ranks,) = spec["containers"]
        ranks["volumeMounts"] = [{"name": "volume", "mountPath": "/volume"}]
        writer = volumes.pod_with("writer", "node-s1", "runs")
        writer["spec"]["containers"][0]["command"] = ["sh", "-c", f"mkdir -p /volume/run; {WRITES}"]
        objects = (volumes.claim("runs", "1Gi"), writer)
        self.cluster.apply(*objects, namespace=self.namespace)
        self.cluster.wait_ready("writer", namespace=self.namespace, deadline_s=END_SECONDS)
        self.cluster.apply(gang, namespace=self.namespace)
        wait_step(self.cluster, NAME, self.namespace, 5)

    def sh(self, command: str) -> str:
        """The output of a command in the pod that writes."""
        return volumes.sh(self.cluster, self.namespace, "writer", command)

    def status(self) -> dict[str, Any]:
        """The status of the job."""
        return status(self.cluster, NAME, self.namespace)

    def observe(self) -> Observation:
        """The state now."""
        lease = self.cluster.get("lease", "flyer-operator", NAMESPACE)["spec"]
        restarts = {
            pod["metadata"]["name"]: sum(
                container["restartCount"]
                for container in pod["status"].get("containerStatuses", ())
            )
            for pod in self.cluster.get("pods", namespace=NAMESPACE)
        }
        job_status = self.status()
        return Observation(
            (str(lease["holderIdentity"]), int(lease.get("leaseTransitions") or 0)),
            restarts,
            int((job_status.get("history") or {}).get("restarts") or 0),
            int((job_status.get("progress") or {}).get("step") or 0),
            len(self.lines()),
        )

    def check(self, before: Observation) -> None:
        """Fail unless steps and lines grow, and nothing else has changed."""
        wait_step(self.cluster, NAME, self.namespace, before.step + 1)
        wait_for("further lines", lambda: len(self.lines()) > before.lines, END_SECONDS)
        now = self.observe()
        changed = (now.lease, now.restarts, now.job_restarts)
        expected = (before.lease, before.restarts, before.job_restarts)
        assert changed == expected, f"{self.status()}\n{self.release.diagnosis(lines=300)}"
        lines = self.lines()
        assert lines == [str(number) for number in range(len(lines))]

    def lines(self) -> list[str]:
        """The lines that are stored; the last one may still be written."""
        return self.sh("cat /volume/lines").splitlines()

    def suspend(self) -> int:
        """Suspend the job, which must save its progress; return its step."""
        self._patch(suspend=True)
        job_status = wait_phase(self.cluster, NAME, self.namespace, "Suspended")
        assert job_status["eviction"]["lostSteps"] == 0, job_status
        saved = job_status["checkpoint"]
        state = json.loads(self.sh(f"cat {saved['path']}"))
        assert state == {"step": saved["step"], "state": lockstep.state_after(saved["step"])}
        return int(saved["step"])

    def resume(self) -> None:
        """Resume the job and wait until it continues from its saved step."""
        stood = int(self.status()["checkpoint"]["step"])
        self._patch(suspend=False)
        wait_phase(self.cluster, NAME, self.namespace, "Running")
        wait_step(self.cluster, NAME, self.namespace, stood + 1)

    def runs_another_job(self, name: str, **fields: Any) -> None:
        """Run a further job to its end."""
        job_object = job(name, 1, SHORT, **{"nodeClass": "a100", **fields})
        self.cluster.apply(job_object, namespace=self.namespace)
        job_status = wait_phase(self.cluster, name, self.namespace, "Succeeded", "Failed")
        assert job_status["phase"] == "Succeeded", job_status

    def mounts_another_volume(self, name: str) -> None:
        """Create a claim and write a file of it in a new pod."""
        objects = (volumes.claim(name, "64Mi"), volumes.pod_with(name, "node-s1", name))
        self.cluster.apply(*objects, namespace=self.namespace)
        self.cluster.wait_ready(name, namespace=self.namespace, deadline_s=END_SECONDS)
        write = "echo kept > /volume/file && sync /volume/file && cat /volume/file"
        assert volumes.sh(self.cluster, self.namespace, name, write) == "kept\n"

    def _patch(self, **fields: Any) -> None:
        self.cluster.kubectl(
            *("patch", "flyerjob", NAME, "--type=merge", f"--namespace={self.namespace}"),
            f"--patch={json.dumps({'spec': fields})}",
        )
