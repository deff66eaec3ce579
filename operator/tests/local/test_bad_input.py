"""Invalid manifests, cluster files and arguments: one error, exit status 2, no effect."""

from __future__ import annotations

import pytest

GOOD = """\
name: test
nodes:
  - {names: [a0, a1], zone: A, nodeClass: a100, slots: 2}
"""


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"spec__nodes": 0}, ["spec.nodes", "0", "1 or more"]),
        ({"spec__nodes": -3}, ["spec.nodes", "-3"]),
        ({"spec__nodes": '"two"'}, ["spec.nodes", "two"]),
        ({"spec__priority": "urgent"}, ["spec.priority", "urgent", "extreme-high"]),
        ({"spec__nodez": 3}, ["spec.nodez", "nodes"]),
        ({"spec__progressDeadline": "soon"}, ["spec.progressDeadline", "soon"]),
    ],
)
def test_a_bad_manifest_names_file_line_field_and_value(bench, spec, words):
    manifest = bench.manifest(**spec)
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert run.returncode == 2, run.stderr
    assert f"{manifest}:" in run.stderr
    for word in words:
        assert word in run.stderr
    assert not bench.state.exists()


def test_a_manifest_that_cannot_start_here_is_refused_with_its_field(bench):
    manifest = bench.manifest()
    text = manifest.read_text()
    manifest.write_text(text.replace("command: [python,", "command: [no-such-program,"))
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert run.returncode == 2
    assert 'spec.template.spec.containers[0].command[0]: "no-such-program"' in run.stderr
    manifest.write_text(
        text.replace("command: [", "workingDir: /no/such/folder\n          command: [")
    )
    run = bench.flyer("run", manifest, "--cluster", bench.cluster())
    assert run.returncode == 2
    assert 'workingDir: "/no/such/folder" is not a folder' in run.stderr
    assert not list((bench.state / "jobs").glob("*"))


def test_a_missing_manifest_and_a_binary_one(bench):
    run = bench.flyer("run", "nothing.yaml", "--cluster", bench.cluster())
    assert (run.returncode, "nothing.yaml" in run.stderr) == (2, True)
    (bench.folder / "binary.yaml").write_bytes(b"\xff\xfe\x00garbage")
    run = bench.flyer("run", "binary.yaml", "--cluster", bench.cluster())
    assert (run.returncode, "UTF-8" in run.stderr) == (2, True)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"spec__nodes": 7}, ["7 nodes", "6"]),
        ({"spec__nodeClass": "h200"}, ["h200"]),
        ({"spec__zone": "C"}, ["C"]),
        ({"spec__ranksPerNode": 9}, ["9", "2"]),
    ],
)
def test_a_job_that_can_never_run_ends_with_105_and_the_reason(bench, spec, words):
    run = bench.flyer("run", bench.manifest(**spec), "--cluster", bench.cluster())
    assert run.returncode == 105, run.stderr
    for word in words:
        assert word in run.stderr
    assert bench.flyer("ps", "-o", "json").stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: [", ["cluster.yaml", "not YAML"]),
        ("just words", ["is not a map"]),
        (GOOD.replace("slots: 2", "slots: 0"), ["cluster.yaml:3", "nodes[0].slots", "0"]),
        (GOOD.replace("a0, a1", "a0, a0"), ["is a duplicate", '"a0"']),
        (GOOD.replace("a0, a1", ""), ["nodes[0].names", "is empty"]),
        (GOOD.replace("zone", "zoned"), ["nodes[0].zone", "is missing", "zoned"]),
        (GOOD + "colour: blue\n", ["cluster.yaml:4", "colour", "blue"]),
        (GOOD.replace("test", "../up"), ["name", "../up"]),
        ("", ["is not a map"]),
    ],
)
def test_a_bad_cluster_file_names_line_field_and_value(bench, text, words):
    cluster = bench.cluster()
    cluster.write_text(text)
    run = bench.flyer("run", bench.manifest(), "--cluster", cluster)
    assert run.returncode == 2, run.stderr
    for word in words:
        assert word in run.stderr


def test_verbs_without_a_cluster_end_with_107(bench):
    for verb in (["ps"], ["nodes"], ["show", "job"], ["suspend", "job"], ["logs", "job"]):
        run = bench.flyer(*verb)
        assert run.returncode == 107, verb
        assert "flyer run" in run.stderr


def test_unknown_jobs_and_arguments(bench):
    driver = bench.drive(bench.manifest(steps=20, hold_at=3))
    bench.step("job", 2)
    for verb in ("show", "why", "logs", "suspend", "resume", "stop", "requeue"):
        run = bench.flyer(verb, "missing")
        assert (run.returncode, "default/missing" in run.stderr) == (102, True), verb
    assert bench.flyer("resume", "job").returncode == 2
    assert bench.flyer("ps", "-o", "xml").returncode == 2
    assert bench.flyer("fly").returncode == 2
    assert bench.flyer("run", "--logs", "some").returncode == 2
    assert bench.flyer("logs", "job", "--failed").returncode == 102
    bench.go()
    assert bench.ended(driver) == 0


def test_errors_are_json_too(bench):
    import json

    run = bench.flyer("ps", "-o", "json")
    error = json.loads(run.stderr)["error"]
    assert error["code"] == "Unreachable"
    assert error["exitStatus"] == 107
    assert error["hint"]
