"""Output formats of `flyer` on a real cluster: json, yaml, wide; and as a kubectl plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from e2e.lib.cli import Flyer, status_of
from e2e.lib.jobs import END_SECONDS, job, wait_phase, wait_step
from e2e.workloads import counting
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from e2e.lib import chart

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

SCRIPT = Path(counting.__file__).read_text()
ENDLESS = "1000000"

# Two attempts: the ranks of the first one report a lost peer, which causes a restart.
CHATTER = """
import os, sys, time
attempt = os.environ["FLYER_ATTEMPT"]
for line in range(30):
    print("attempt", attempt, "line", line, flush=True)
    time.sleep(0.1)
sys.exit(75 if attempt == "1" else 0)
"""
LINES, RANKS, ATTEMPTS = 30, 4, 2

ASKED: dict[str, tuple[str, ...]] = {
    "ps": (),
    "show": ("runs",),
    "why": ("waits",),
    "nodes": (),
    "queues": (),
    "quotas": (),
    "top": ("--interval=3",),
}
WIDE = {
    "ps": ("ETA", "LAST-CKPT", "QUEUE", "NAMESPACE", "ATTEMPT"),
    "nodes": ("LEAF", "CLASS", "SLOTS", "ATTEMPT"),
    "top": ("STATE", "LOST"),
}


def test_every_result_has_every_output_format(release: chart.Release, namespace: str) -> None:
    cluster, flyer = release.cluster, Flyer(release.cluster, namespace)
    runs = job("runs", 2, SCRIPT, ENDLESS, nodeClass="a100")
    # More nodes than are free: it waits for as long as the other one runs.
    waits = job("waits", 3, SCRIPT, "1", nodeClass="a100", priority="low")
    cluster.apply(runs, namespace=namespace)
    wait_step(cluster, "runs", namespace, 10)
    cluster.apply(waits, namespace=namespace)
    wait_for("a verdict", lambda: flyer("why", "waits")["reasons"], END_SECONDS)

    parsed: dict[str, Any] = {}
    for verb, words in ASKED.items():
        parsed[verb] = flyer(verb, *words)
        yaml = YAML(typ="safe", pure=True).load(flyer.run(verb, *words, "-o", "yaml").stdout)
        assert shape(yaml) == shape(parsed[verb]), verb
        if verb == "why":
            assert yaml["verdict"] == parsed[verb]["verdict"]
    for verb, columns in WIDE.items():
        people = flyer.run(verb, *ASKED[verb], "-o", "wide").stdout
        assert set(columns) <= set(people.splitlines()[0].split()), people
        assert "None" not in people, people
    assert {item["name"]: item["state"] for item in parsed["ps"]} == {
        "runs": "Running",
        "waits": "Queued",
    }
    detail = parsed["show"]
    assert detail["job"]["name"] == detail["object"]["metadata"]["name"] == "runs"
    assert detail["object"]["status"]["phase"] == "Running"
    assert "Started" in [event["reason"] for event in detail["events"]]
    why = parsed["why"]
    assert (why["job"], why["verdict"]) == (f"{namespace}/waits", "cannot")
    assert any(reason["job"] == f"{namespace}/runs" for reason in why["reasons"]), why
    assert why["unblock"], why
    has = {node["name"] for node in parsed["nodes"] if node["job"] == f"{namespace}/runs"}
    assert len(has) == 2, parsed["nodes"]
    (queue,) = (item for item in parsed["queues"] if f"{namespace}/runs" in item["jobs"])
    assert queue["runningNodes"] >= 2, queue
    (row,) = parsed["top"]
    assert (row["job"], row["state"], row["nodes"]) == (f"{namespace}/runs", "Running", 2)
    assert row["stepsPerSecond"] > 0, row


def shape(value: Any) -> Any:
    """The names in an answer: figures change between two looks."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    return [shape(element) for element in value[:1]] if isinstance(value, list) else None


def test_logs_are_followed_over_all_attempts_and_ranks_to_the_jobs_end(
    release: chart.Release, namespace: str
) -> None:
    cluster, flyer = release.cluster, Flyer(release.cluster, namespace)
    cluster.apply(job("chatter", 2, CHATTER, nodeClass="a100", ranksPerNode=2), namespace=namespace)
    # From before the first pod is there; as a program, and as a person who looks at one rank.
    person = Flyer(cluster, namespace, plugin=True)
    with (
        flyer.running("logs", "-f", "chatter", "-o", "json") as all_of_them,
        person.running("logs", "-f", "chatter", "--rank=3") as one_rank,
    ):
        status, output = status_of(all_of_them)
        assert status == 0, output
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        status, output = status_of(one_rank)
        assert status == 0, output
    assert flyer("show", "chatter")["job"]["state"] == "Succeeded"
    for attempt in range(1, ATTEMPTS + 1):
        own = [f"attempt {attempt} line {line}" for line in range(LINES)]
        for rank in range(RANKS):
            texts = [
                line["text"] for line in lines if (line["attempt"], line["rank"]) == (attempt, rank)
            ]
            assert [text for text in texts if text.startswith("attempt")] == own, (attempt, rank)
        assert [
            line for line in output.splitlines() if line.startswith(f"attempt {attempt} ")
        ] == own


def test_kubectl_finds_its_plugin(
    release: chart.Release, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, plugin = release.cluster, Flyer(release.cluster, namespace, plugin=True)
    # It is about Kubernetes, also where a cluster of this machine is near.
    (tmp_path / ".flyer" / "near" / "jobs").mkdir(parents=True)
    (tmp_path / ".flyer" / "near" / "lock").touch()
    monkeypatch.chdir(tmp_path)
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(job("one", 1, SCRIPT, "5")))
    assert "counted to 5" in plugin.run("run", str(manifest)).stdout
    assert [row["name"] for row in plugin("ps")] == ["one"]
    wait_phase(cluster, "one", namespace, "Succeeded")
    assert "Succeeded" in plugin.run("show", "one").stdout
    # kubectl becomes the plugin, so a status is handed on.
    assert f"job `{namespace}/none`" in plugin.run("show", "none", status=102).stderr
