"""Main scenario: a training run over two zones survives all faults, bit for bit.

Four pods with a pair of GPUs each reduce gradients with HFReduce over the pod network; data and
checkpoints are in a 3FS claim. A job of a higher priority takes all nodes: it is the same training
without interruption, and provides the expected result. Its ranks reduce in their own processes,
those of the run in the `hfreduced` of their pods. One of these is killed, and the run restarts
from its checkpoint. Then a kubelet, a storage service and the leading operator are killed; the run
continues.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib.chart import NAMESPACE
from e2e.lib.jobs import END_SECONDS, job, logs, pods_of, status, wait_phase, wait_step
from e2e.lib.pods import mount_torch
from e2e.lib.volumes import claim, pod_with, sh
from e2e.workloads import training
from testcluster.handle import wait_for
from testcluster.measurements import record

if TYPE_CHECKING:
    from e2e.lib import chart
    from testcluster.handle import Cluster

# Four ranks import torch four times, on a machine that does other things too.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

NODES, GPUS = 4, 2
STEPS = 120
SCRIPT = Path(training.__file__).read_text()


@dataclass(frozen=True)
class Volume:
    """A pod with the claim, on a node without jobs."""

    cluster: Cluster
    namespace: str

    def sh(self, command: str) -> str:
        """Output of a command in the pod."""
        return sh(self.cluster, self.namespace, "look", command)

    def hold(self, name: str, step: int) -> None:
        """Lets the job continue up to this step."""
        folder = f"/volume/{name}"
        self.sh(f"mkdir -p {folder} && echo {step} > {folder}/.u && mv {folder}/.u {folder}/until")

    def release_job(self, name: str) -> None:
        """Lets the job continue to its end."""
        self.sh(f"rm /volume/{name}/until")

    def final(self, name: str) -> Any:
        """The results of the job."""
        return json.loads(self.sh(f"cat /volume/{name}/final.json"))


def gang(name: str, priority: str, **fields: Any) -> dict[str, Any]:
    """The training job, on a pair of GPUs of each of four nodes."""
    arguments = ("/volume", name, str(STEPS))
    job_object = job(name, NODES, SCRIPT, *arguments, nodeClass="a100", priority=priority, **fields)
    spec = job_object["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "volume", "persistentVolumeClaim": {"claimName": "runs"}}]
    (container,) = spec["containers"]
    container["volumeMounts"] = [{"name": "volume", "mountPath": "/volume"}]
    limits = {"fireflyer.dev/gpu": GPUS, "fireflyer.dev/rdma-hfreduce": 1}
    container["resources"]["limits"] = limits
    mount_torch(job_object)
    return job_object


def test_a_run_over_two_zones_survives_everything(release: chart.Release, namespace: str) -> None:
    cluster = release.cluster
    volume = Volume(cluster, namespace)
    cluster.apply(claim("runs", "256Mi"), pod_with("look", "node-s1", "runs"), namespace=namespace)
    cluster.wait_ready("look", namespace=namespace, deadline_s=END_SECONDS)
    volume.sh("cat /usr/lib/python3*/*.py > /volume/corpus")

    volume.hold("patient", 30)
    started_at = time.monotonic()
    patient_job = gang("patient", "normal", collectives={"daemon": True})
    cluster.apply(patient_job, namespace=namespace)
    wait_step(cluster, "patient", namespace, 5)
    record("main_scenario", "apply_to_steps_seconds", time.monotonic() - started_at)
    running = status(cluster, "patient", namespace)
    assert running["zones"] == "A+B"
    assert len(running["assignment"]["crossZonePair"]) == 2

    # The job waits at a step until a component was killed, so it continues without that component.
    preempt(volume)
    kill_daemon(volume)
    kill_kubelet(volume)
    kill_storage(release, volume)
    kill_operator(volume)
    volume.release_job("patient")

    job_status = wait_phase(cluster, "patient", namespace, "Succeeded", "Failed")
    assert job_status["phase"] == "Succeeded", job_status
    # One preemption and one restart; an overloaded test machine may cause more restarts.
    last, restarts = job_status["history"]["attempt"], job_status["history"].get("restarts", 0)
    assert last == restarts + 2
    assert restarts >= 1
    assert job_status["progress"]["step"] == STEPS
    patient, urgent = (volume.final(name) for name in ("patient", "urgent"))
    assert (urgent["attempt"], urgent["from_step"]) == (1, 0), "it was not interrupted"
    assert (patient["attempt"], patient["crossings"]) == (last, [1, 1])
    assert patient["digest"] == urgent["digest"]

    # The last attempts' logs can still be read; all ranks have the same bits.
    for attempt in range(max(1, last - 2), last + 1):
        output = logs(cluster, "patient", namespace, attempt=attempt)
        ranks = output.count(f"of {NODES} attempt {attempt} from step")
        # A pod of an attempt that ended early may have written nothing.
        least = NODES if attempt == last or restarts == 1 else 0
        assert least <= ranks <= NODES, (attempt, output)
        pairs = re.findall(r"FLYER_GPUS=(\S+) FLYER_GPU_PAIRS=(\S+) \S+LEVEL=(\S+)", output)
        assert len(pairs) == ranks, output
        for gpus, pair, level in pairs:
            assert sorted(gpus.split(",")) == sorted(pair.split("+")), "one whole pair"
            assert level == "2", "the class of HFReduce"
    assert output.count(f"final {urgent['digest']}") == NODES


def evicted_in(cluster: Cluster, namespace: str, attempt: int) -> bool:
    """Whether that was the latest attempt that lost its nodes."""
    evicted = status(cluster, "patient", namespace).get("eviction") or {}
    return bool(evicted.get("attempt") == attempt)


def preempt(volume: Volume) -> None:
    """The urgent job preempts the run and ends; the run resumes from its checkpoint."""
    cluster, namespace = volume.cluster, volume.namespace
    started_at = time.monotonic()
    first = status(cluster, "patient", namespace)["history"]["attempt"]
    cluster.apply(gang("urgent", "high"), namespace=namespace)
    wait_phase(cluster, "urgent", namespace, "Running", "Succeeded")
    record("main_scenario", "urgent_apply_to_running_seconds", time.monotonic() - started_at)
    wait_for("the eviction", lambda: evicted_in(cluster, namespace, first), END_SECONDS)
    evicted = status(cluster, "patient", namespace)
    saved = int(evicted["checkpoint"]["step"])
    assert 5 <= saved <= 30
    eviction = evicted["eviction"]
    assert (eviction["suspendCode"], eviction["lostSteps"]) == (3, 0)
    job_status = wait_phase(cluster, "urgent", namespace, "Succeeded", "Failed")
    assert job_status["phase"] == "Succeeded", job_status
    wait_phase(cluster, "patient", namespace, "Running", attempt=first + 1)
    volume.hold("patient", 65)
    wait_step(cluster, "patient", namespace, 65)
    resumed = logs(cluster, "patient", namespace, attempt=first + 1)
    assert f"attempt {first + 1} from step {saved}" in resumed


def kill_daemon(volume: Volume) -> None:
    """Kills one pod's hfreduced: the status names it; the gang resumes from its checkpoint."""
    cluster, namespace = volume.cluster, volume.namespace
    before = status(cluster, "patient", namespace)
    attempt, node = before["history"]["attempt"], before["assignment"]["nodes"][2]["name"]
    (pod,) = pods_of(cluster, "patient", namespace, attempt=attempt, node_rank=2)
    cluster.kill_container(pod, "flyer-hfreduced")
    started_at = time.monotonic()
    wait_for("the restart", lambda: evicted_in(cluster, namespace, attempt), END_SECONDS)
    eviction = status(cluster, "patient", namespace)["eviction"]
    assert "hfreduced" in eviction["message"], eviction
    assert node in eviction["message"], eviction
    job_status = wait_phase(cluster, "patient", namespace, "Running", attempt=attempt + 1)
    record("main_scenario", "hfreduced_killed_to_running_seconds", time.monotonic() - started_at)
    wait_step(cluster, "patient", namespace, 65)
    resumed = logs(cluster, "patient", namespace, attempt=attempt + 1)
    assert f"attempt {attempt + 1} from step {job_status['checkpoint']['step']}" in resumed


def kill_kubelet(volume: Volume) -> None:
    """Kubernetes marks the node NotReady, but its pods stay connected and continue."""
    cluster, namespace = volume.cluster, volume.namespace
    before = status(cluster, "patient", namespace)
    attempt, node = before["history"]["attempt"], before["assignment"]["nodes"][-1]["name"]

    def ready() -> str:
        conditions = cluster.get("node", node)["status"]["conditions"]
        return str(
            next(condition["status"] for condition in conditions if condition["type"] == "Ready")
        )

    kubelet = cluster.process(f"{node}-kubelet")
    kubelet.kill()
    try:
        wait_for("the node to be not ready", lambda: ready() == "Unknown", END_SECONDS)
        volume.hold("patient", 70)
        wait_step(cluster, "patient", namespace, 70)
        check_same_attempt(cluster, namespace, attempt)
    finally:
        kubelet.start()
    wait_for("the node to be back", lambda: ready() == "True", END_SECONDS)


def check_same_attempt(cluster: Cluster, namespace: str, attempt: int) -> None:
    """The same attempt continues, unless an overloaded test machine has delayed a kubelet."""
    job_status = status(cluster, "patient", namespace)
    if job_status["history"]["attempt"] != attempt:
        assert job_status["eviction"]["reason"] == "NodeFailures", job_status["eviction"]


def kill_storage(release: chart.Release, volume: Volume) -> None:
    """Checkpoints stay durable without the service, and it restarts by itself."""
    cluster, namespace = release.cluster, volume.namespace
    attempt = status(cluster, "patient", namespace)["history"]["attempt"]
    pod = release.pods("threefs-storage")[0]
    cluster.kill_container(pod, "storage")
    volume.hold("patient", 85)

    def durable() -> bool:
        checkpoint = status(cluster, "patient", namespace).get("checkpoint") or {}
        return int(checkpoint.get("step") or 0) == 80

    wait_for("durable checkpoints", durable, END_SECONDS)
    (was,) = (item["restartCount"] for item in pod["status"]["containerStatuses"])

    def back() -> bool:
        pod_status = cluster.get("pod", pod["metadata"]["name"], NAMESPACE)["status"]
        (container,) = pod_status["containerStatuses"]
        return bool(container["restartCount"] > was and container["ready"])

    wait_for("the storage service", back, END_SECONDS)
    check_same_attempt(cluster, namespace, attempt)


def kill_operator(volume: Volume) -> None:
    """The other replica leads and receives the job's steps; the job is unaffected."""
    cluster, namespace = volume.cluster, volume.namespace

    def leader() -> str:
        holder = cluster.get("lease", "flyer-operator", NAMESPACE)["spec"].get("holderIdentity")
        return str(holder or "").rpartition("-")[0]

    old = leader()
    before = status(cluster, "patient", namespace)
    epoch, attempt = before["epoch"], before["history"]["attempt"]
    cluster.kill_container(cluster.get("pod", old, NAMESPACE), "operator")
    started_at = time.monotonic()
    # The restarted container has the old pod's name; the next leader is a new process anyway.
    wait_for(
        "another term",
        lambda: status(cluster, "patient", namespace)["epoch"] > epoch or leader() not in ("", old),
        END_SECONDS,
    )
    record("main_scenario", "leader_killed_to_next_seconds", time.monotonic() - started_at)
    volume.hold("patient", 105)
    wait_step(cluster, "patient", namespace, 105)
    assert status(cluster, "patient", namespace)["epoch"] > epoch
    check_same_attempt(cluster, namespace, attempt)
