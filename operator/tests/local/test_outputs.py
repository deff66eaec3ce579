"""Output of the verbs: JSON with the published fields, and tables that fit a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from flyer import views
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[3]


@pytest.fixture
def running(bench):
    """A job that runs and one that waits for its nodes."""
    bench.drive(bench.manifest("runs", steps=20, hold_at=4, spec__nodes=4))
    bench.step("runs", 4)
    bench.start("run", bench.manifest("waits", steps=3, spec__nodes=4))
    bench.job("waits", lambda job: job.state == "Queued", "queued")
    return bench


def test_every_verb_prints_json_and_yaml_that_parse(running):
    bench = running
    for verb in (["ps"], ["show", "runs"], ["why", "waits"], ["nodes"], ["queues"]):
        answer = json.loads(bench.flyer(*verb, "-o", "json").stdout)
        assert answer
        assert YAML(typ="safe").load(bench.flyer(*verb, "-o", "yaml").stdout) == answer or (
            verb[0] in ("show", "ps")  # ages of metrics may differ between the two calls
        )
    jobs = {job["name"]: job for job in json.loads(bench.flyer("ps", "-o", "json").stdout)}
    assert jobs["runs"]["placement"][1] == {"name": "a1", "zone": "A", "firstRank": 2}
    assert jobs["runs"]["progress"]["totalSteps"] == 20
    output = json.loads(bench.flyer("show", "runs", "-o", "json").stdout)
    assert output["object"]["kind"] == "FlyerJob"
    assert [event["sequence"] for event in output["events"]] == sorted(
        event["sequence"] for event in output["events"]
    )
    lines = bench.flyer("logs", "runs", "--rank", "0", "-o", "json").stdout.splitlines()
    assert json.loads(lines[-1])["text"] == "step 4"


def test_why_prints_numbers_holders_and_remedies(running):
    why = running.flyer("why", "waits")
    assert why.returncode == 0, why.stderr
    assert "cannot start now" in why.stdout
    assert "flyer suspend default/runs" in why.stdout
    assert re.search(r"4 (free )?nodes|2 of (4|6)|needs 4", why.stdout), why.stdout
    answer = json.loads(running.flyer("why", "waits", "-o", "json").stdout)
    assert answer["verdict"] == "cannot"
    assert answer["reasons"]


def test_screens_fit_the_width_of_the_terminal(running):
    for verb in (["ps"], ["nodes"], ["queues"], ["show", "runs"]):
        text = running.flyer(*verb).stdout
        assert "\x1b" not in text
        assert len(text.splitlines()) <= 50
        assert "None" not in text
    header = running.flyer("ps").stdout.splitlines()[0].split()
    assert header == [
        "NAME", "STATE", "REASON", "NODES", "ZONE", "PRIORITY", "PROGRESS", "RESTARTS", "AGE",
    ]  # fmt: skip


def test_without_a_terminal_no_control_sequence_is_printed(bench):
    run = bench.flyer("run", bench.manifest(steps=3), "--cluster", bench.cluster())
    assert run.returncode == 0, run.stderr
    verbs = ("ps", "nodes", "queues", "show job", "logs job", "why job", "show missing", "help")
    printed = [run, *(bench.flyer(*verb.split()) for verb in verbs)]
    text = "".join(item.stdout + item.stderr for item in printed)
    assert "Succeeded" in text
    controls = {letter for letter in text if unicodedata.category(letter) == "Cc"}
    assert controls == {"\n"}


def test_ps_watch_prints_changes_as_lines(running):
    watch = running.start("ps", "-w")
    running.until("its first lines", lambda: "waits" in running.out())
    running.flyer("stop", "waits")
    running.until("the change", lambda: "Failed" in running.out())
    watch.terminate()
    assert running.out().count("NAME") == 1


def test_the_reference_page_names_every_published_field():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for kind in (
        views.JobView, views.NodeView, views.QueueView, views.WhyView, views.WhyReason,
        views.EventView, views.AttemptView, views.FailureView, views.ProgressView,
        views.CheckpointView,
    ):  # fmt: skip
        for name in kind.__dataclass_fields__:
            assert f"`{views.camel(name)}`" in page, f"{kind.__name__}.{name}"


def test_the_reference_page_names_every_event_reason():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    text = (ROOT / "operator" / "src" / "flyer" / "job_events.py").read_text()
    reasons = set(re.findall(r'^[A-Z_]+: Final = "([A-Z]\w+)"', text, re.MULTILINE))
    assert len(reasons) > 12
    for reason in reasons:
        assert reason in page, reason


def test_help_has_examples():
    result = subprocess.run(
        [sys.executable, "-m", "flyer.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "flyer suspend JOB" in result.stdout


def test_the_example_cluster_is_valid():
    from flyer.local.cluster import load_cluster

    cluster = load_cluster(ROOT / "examples" / "clusters" / "two-zones.yaml")
    nodes = cluster.engine_nodes()
    assert {node.zone for node in nodes} == {"A", "B"}
    assert [node.name for node in nodes if node.zone == "A"] == ["a0", "a1", "a2"]
    assert {(node.slots, node.node_class) for node in nodes} == {(2, "a100")}
