"""`flyer` on a real cluster: one job's lifecycle through its commands, parsed as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib.cli import Flyer
from e2e.lib.jobs import END_SECONDS, job
from e2e.workloads import counting
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from e2e.lib import chart

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

SCRIPT = Path(counting.__file__).read_text()
ENDLESS = 1_000_000


def manifest(folder: Path, name: str, nodes: int, steps: int, **spec: Any) -> str:
    """A file to run."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(job(name, nodes, SCRIPT, str(steps), nodeClass="a100", **spec)))
    return str(path)


def test_the_lifecycle_of_a_job_with_the_commands_of_flyer(
    release: chart.Release, namespace: str, tmp_path: Path
) -> None:
    flyer = Flyer(release.cluster, namespace)

    def view(name: str) -> dict[str, Any]:
        job_view: dict[str, Any] = flyer("show", name)["job"]
        return job_view

    def until(description: str, name: str, state: str) -> dict[str, Any]:
        def probe() -> dict[str, Any] | None:
            job_view = view(name)
            return job_view if job_view["state"] == state else None

        return wait_for(description, probe, END_SECONDS)

    # run, ps, show, top, nodes, queues
    (run_view,) = flyer("run", manifest(tmp_path, "wide", 4, ENDLESS, queue="research"), "--detach")
    assert (run_view["name"], run_view["namespace"], run_view["nodes"]) == ("wide", namespace, 4)
    running = until("the job to run", "wide", "Running")
    assert running["zones"] == ["A", "B"]
    assert len(running["crossZonePair"]) == 2
    wait_for("progress", lambda: (view("wide")["progress"] or {}).get("step", 0) > 10, END_SECONDS)
    assert [(item["name"], item["state"]) for item in flyer("ps")] == [("wide", "Running")]
    (row,) = flyer("top")
    assert (row["job"], row["state"]) == (f"{namespace}/wide", "Running"), row
    nodes = {node["name"]: node for node in flyer("nodes")}
    assert {node["name"] for node in nodes.values() if node["job"] == f"{namespace}/wide"} == {
        "node-a1", "node-a2", "node-b1", "node-b2"
    }  # fmt: skip
    queue = next(item for item in flyer("queues") if item["name"] == "research")
    assert (queue["runningJobs"], queue["runningNodes"]) == (1, 4)

    # why: another one waits for its nodes; priority: and then takes them.
    path = manifest(tmp_path, "small", 1, 30, priority="low")
    flyer("run", path, "--detach")
    wait_for("a verdict", lambda: flyer("why", "small")["reasons"], END_SECONDS)
    why = flyer("why", "small")
    assert why["verdict"] == "cannot", why
    assert any(reason["job"] == f"{namespace}/wide" for reason in why["reasons"]), why
    assert flyer("priority", "small", "very-high")["priority"] == "very-high"
    until("the small one's end", "small", "Succeeded")
    again = until("the wide one to run again", "wide", "Running")
    assert again["attempt"] == 2
    assert [attempt["lostSteps"] for attempt in again["attempts"][:1]] == [0]

    # suspend, resume
    suspended_view = flyer("suspend", "wide", "--reason", "a demo")
    assert suspended_view["state"] == "Suspended", suspended_view
    saved = suspended_view["checkpoint"]["step"]
    assert flyer.run("suspend", "wide", status=2).stderr, "it is suspended already"
    flyer("resume", "wide")
    resumed = until("it to be resumed", "wide", "Running")
    assert (resumed["attempt"], resumed["restarts"]) == (3, 0)
    wait_for("progress", lambda: view("wide")["progress"]["step"] > saved, END_SECONDS)

    # stop, logs of all attempts
    flyer("stop", "wide", "--reason", "enough")
    ended = until("the end", "wide", "Failed")
    assert "enough" in ended["message"] or ended["reason"] == "Stopped", ended
    lines = [
        json.loads(line)
        for line in flyer.run("logs", "small", "-o", "json").stdout.split("\n")
        if line
    ]
    assert {key: lines[-1][key] for key in ("attempt", "rank")} == {"attempt": 1, "rank": 0}
    assert "counted to 30" in lines[-1]["text"]
    texts = flyer.run("logs", "wide", "--rank", "0").stdout
    assert texts.count("saved step") == 3, texts
    nodes = {node["name"]: node for node in flyer("nodes")}
    assert not [node for node in nodes.values() if node["job"] == f"{namespace}/small"]


def test_following_a_job_ends_with_the_exit_status_of_the_job(
    release: chart.Release, namespace: str, tmp_path: Path
) -> None:
    flyer = Flyer(release.cluster, namespace)
    result = flyer.run("run", manifest(tmp_path, "short", 2, 5), "--logs", "all")
    assert "[1] rank 1 counted to 5" in result.stdout, (result.stdout, result.stderr)
    broken = tmp_path / "broken.yaml"
    broken.write_text(json.dumps(job("broken", 1, "raise SystemExit(3)")))
    flyer.run("run", str(broken), status=3)


TORN = """
import os, time
def step():
    raise ValueError("the loss is gone")
if os.environ["RANK"] == "1":
    step()
time.sleep(3600)
"""


def test_a_traceback_is_available_after_the_deletion_of_its_pod(
    release: chart.Release, namespace: str, tmp_path: Path
) -> None:
    flyer = Flyer(release.cluster, namespace)
    torn = tmp_path / "torn.yaml"
    torn.write_text(json.dumps(job("torn", 2, TORN)))
    flyer.run("run", str(torn), status=1)
    output = flyer.run("logs", "torn", "--failed").stdout
    assert output.startswith("rank 1 on node ")
    assert "in step" in output
    assert "ValueError: the loss is gone" in output
    name = f"--namespace={namespace}"
    release.cluster.kubectl("delete", "pods", name, "--selector=fireflyer.dev/job=torn")
    assert flyer.run("logs", "torn", "--failed").stdout == output
    assert "ValueError: the loss is gone" in flyer.run("show", "torn").stdout
