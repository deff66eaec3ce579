"""The exit statuses of docs/reference/cli.md on a real cluster."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib.cli import Flyer, status_of
from e2e.lib.jobs import END_SECONDS, job, status, wait_phase, wait_step
from e2e.workloads import counting
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from e2e.lib import chart

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

SCRIPT = Path(counting.__file__).read_text()
ENDLESS = "1000000"
BAD, NO_SUCH_JOB, STOPPED, SUSPENDED, NEVER, LATE, UNREACHABLE = 2, 102, 103, 104, 105, 106, 107
INTERRUPTED = 130

# It ignores all requests.
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(3600)
"""


def manifest(folder: Path, *jobs: dict[str, Any]) -> str:
    path = folder / f"{jobs[0]['metadata']['name']}.yaml"
    path.write_text("\n---\n".join(json.dumps(item) for item in jobs))
    return str(path)


def test_an_unknown_job_has_a_distinct_exit_status(release: chart.Release, namespace: str) -> None:
    flyer = Flyer(release.cluster, namespace)
    for verb in ("show", "why", "logs", "suspend", "resume", "stop", "requeue"):
        stderr = flyer.run(verb, "none", status=NO_SUCH_JOB).stderr
        assert stderr.startswith(f"error: job `{namespace}/none`"), (verb, stderr)
    stderr = flyer.run("priority", "none", "high", "-o", "json", status=NO_SUCH_JOB).stderr
    error = json.loads(stderr)["error"]
    assert (error["code"], error["exitStatus"]) == ("NotFound", NO_SUCH_JOB)


def test_a_refused_manifest_has_a_distinct_exit_status(
    release: chart.Release, namespace: str, tmp_path: Path
) -> None:
    """Nothing of it is created, the good job neither."""
    cluster, flyer = release.cluster, Flyer(release.cluster, namespace)
    good = job("good", 1, SCRIPT, "1")
    none = job("none-at-all", 0, SCRIPT, "1")
    urgent = job("urgent", 1, SCRIPT, "1", priority="urgent")
    for bad, field in ((none, "spec.nodes"), (urgent, "spec.priority")):
        stderr = flyer.run("run", manifest(tmp_path, good, bad), status=BAD).stderr
        assert field in stderr, stderr
        assert cluster.get("flyerjobs", namespace=namespace) == []
    unknown = flyer.run("run", str(tmp_path / "nowhere.yaml"), status=BAD).stderr
    assert "nowhere.yaml" in unknown
    flyer.run("ps", "--no-such-option", status=BAD)


def test_a_followed_job_determines_the_status(
    release: chart.Release, namespace: str, tmp_path: Path
) -> None:
    """Interrupted, suspended, stopped under `flyer run`; and one that can never run."""
    cluster, flyer = release.cluster, Flyer(release.cluster, namespace)
    names = ("left", "paused", "ended")
    paths = {
        name: manifest(tmp_path, job(name, 1, SCRIPT, ENDLESS, nodeClass="a100")) for name in names
    }
    with (
        flyer.running("run", paths["left"]) as interrupted,
        flyer.running("run", paths["paused"]) as paused,
        flyer.running("run", paths["ended"]) as ended,
    ):
        huge = manifest(tmp_path, job("huge", 99, SCRIPT, "1"))
        stderr = flyer.run("run", huge, status=NEVER).stderr
        assert "can never run on this cluster" in stderr, stderr
        assert flyer("why", "huge", status=NEVER)["verdict"] == "never"

        def are_made() -> bool:
            jobs = cluster.get("flyerjobs", namespace=namespace)
            return {item["metadata"]["name"] for item in jobs} >= set(names)

        wait_for("the jobs to be made", are_made, END_SECONDS)
        for name in names:
            wait_step(cluster, name, namespace, 1)
        interrupted.send_signal(signal.SIGINT)
        flyer.run("suspend", "paused")
        flyer.run("stop", "ended", "--reason=enough")
        for process, expected in (
            (interrupted, INTERRUPTED),
            (paused, SUSPENDED),
            (ended, STOPPED),
        ):
            exit_status, stderr = status_of(process)
            assert exit_status == expected, (expected, stderr)
    assert status(cluster, "left", namespace)["phase"] == "Running", "it was only left"


def test_an_unreachable_api_server_has_a_distinct_exit_status(
    release: chart.Release, namespace: str, tmp_path: Path
) -> None:
    cluster, flyer = release.cluster, Flyer(release.cluster, namespace)
    cluster.apply(job("deaf", 1, DEAF, nodeClass="a100"), namespace=namespace)
    wait_phase(cluster, "deaf", namespace, "Running")
    wait_for("its deafness", lambda: "deaf" in flyer.run("logs", "deaf").stdout, END_SECONDS)
    stderr = flyer.run("suspend", "deaf", "--timeout=1", status=LATE).stderr
    assert "is still Suspending" in stderr, stderr
    flyer.run("stop", "deaf", "--now")
    wait_phase(cluster, "deaf", namespace, "Failed")

    # No server at the API server's address.
    text = Path(cluster.kubeconfig).read_text()
    nowhere = tmp_path / "nowhere"
    nowhere.write_text(re.sub(r"(https://[^:\s]+):\d+", r"\1:9", text))
    stderr = flyer.run("ps", f"--kubeconfig={nowhere}", status=UNREACHABLE).stderr
    assert stderr.startswith("error:"), stderr
