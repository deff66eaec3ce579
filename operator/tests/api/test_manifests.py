"""Manifests: errors name file, line, field, value and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.api import ManifestError, Priority, load_manifest
from flyer.api.manifest import BYTES_MAX

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
apiVersion: fireflyer.dev/v1alpha1
kind: FlyerJob
metadata: {name: gpt}
spec:
  nodes: 4
  ranksPerNode: 2
  priority: high
  nodeClass: a100
  activeDeadline: 24h
  template:
    spec:
      nodeSelector: {disk: fast}
      containers:
        - name: trainer
          command: [python, train.py]
          env: [{name: STEPS, value: "100"}]
  zone: A
"""


def problems(text: str) -> list[str]:
    with pytest.raises(ManifestError) as excinfo:
        load_manifest(text, name="job.yaml")
    return [str(problem) for problem in excinfo.value.problems]


def test_a_good_manifest_gets_its_defaults() -> None:
    (job,) = load_manifest(GOOD)
    assert (job.key, job.user) == ("default/gpt", "default")
    assert (job.spec.node_class, job.spec.zone) == ("a100", "A")
    assert job.spec.priority is Priority.HIGH
    assert job.spec.active_deadline is not None
    assert job.spec.active_deadline.seconds == 86_400
    assert job.spec.preemption.checkpoint_grace_period.seconds == 60
    assert job.spec.max_restarts == 10
    assert job.spec.template.trainer.command == ["python", "train.py"]


@pytest.mark.parametrize(
    ("metadata", "spec", "queue"),
    [
        ("{name: gpt}", "", "default"),
        ("{name: gpt, labels: {kueue.x-k8s.io/queue-name: vision}}", "", "vision"),
        ("{name: gpt, labels: {kueue.x-k8s.io/queue-name: vision}}", "  queue: mine\n", "mine"),
    ],
)
def test_the_queue_is_read_from_the_spec_or_from_the_label_of_kueue(
    metadata: str, spec: str, queue: str
) -> None:
    text = GOOD.replace("{name: gpt}", metadata).replace("spec:\n", f"spec:\n{spec}", 1)
    (job,) = load_manifest(text)
    assert job.queue == queue


def test_the_controller_of_a_job_is_read_from_managed_by() -> None:
    def manager_of(value: str) -> str:
        (job,) = load_manifest(GOOD.replace("spec:\n", f"spec:\n  managedBy: {value}\n", 1))
        return job.others

    assert manager_of("fireflyer.dev/flyerjob-controller") == ""
    assert manager_of("kueue.x-k8s.io/multikueue") == "kueue.x-k8s.io/multikueue"
    wrong = problems(GOOD.replace("spec:\n", "spec:\n  managedBy: kueue\n", 1))
    assert "spec.managedBy" in wrong[0]
    assert "is invalid" in wrong[0]


def test_pod_fields_that_only_kubernetes_reads_are_kept() -> None:
    (job,) = load_manifest(GOOD)
    assert job.to_object()["spec"]["template"]["spec"]["nodeSelector"] == {"disk": "fast"}


def test_a_written_manifest_can_be_parsed() -> None:
    (job,) = load_manifest(GOOD)
    assert type(job).model_validate(job.to_object()) == job


def test_one_file_may_hold_several_jobs(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text(GOOD + "---\n" + GOOD.replace("gpt", "bert") + "---\n")
    assert [job.key for job in load_manifest(path)] == ["default/gpt", "default/bert"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("nodes: 4", "nodes: 0", "job.yaml:5: spec.nodes: 0 is too small: give 1 or more"),
        ("nodes: 4", "nodes: -3", "job.yaml:5: spec.nodes: -3 is too small: give 1 or more"),
        (
            "nodes: 4",
            'nodes: "4"',
            'job.yaml:5: spec.nodes: "4" is not an integer: write a number without quotes',
        ),
        (
            "nodes: 4",
            "nodes: 1.5",
            "job.yaml:5: spec.nodes: 1.5 is not an integer: write a number without quotes",
        ),
        ("nodes: 4", "nodes:", "job.yaml:5: spec.nodes: nothing is not an integer: "),
        ("nodes: 4", "nodes: [4]", "job.yaml:5: spec.nodes: is not an integer: "),
        ("  nodes: 4\n", "", "job.yaml:4: spec.nodes: is missing: add it"),
        (
            "priority: high",
            "priority: hihg",
            'job.yaml:7: spec.priority: "hihg" is not a valid value: did you '
            "mean high? give one of "
            "extreme-high, very-high, high,",
        ),
        (
            "24h",
            "24",
            "job.yaml:9: spec.activeDeadline: 24 is not a duration: write a text with a unit, such",
        ),
        (
            "24h",
            "a day",
            'job.yaml:9: spec.activeDeadline: "a day" is not a duration: write hours,',
        ),
        (
            "24h",
            "0s",
            'job.yaml:9: spec.activeDeadline: "0s" would end immediately: leave the field',
        ),
        (
            "activeDeadline: 24h",
            "progressDeadline: 0s",
            'job.yaml:9: spec.progressDeadline: "0s" would end immediately: write null for no',
        ),
        ("24h", "-1h", 'job.yaml:9: spec.activeDeadline: "-1h" is not a duration'),
        (
            "kind: FlyerJob",
            "kind: Job",
            'job.yaml:2: kind: "Job" is not a valid value: give FlyerJob',
        ),
        ("v1alpha1", "v2", "job.yaml:1: apiVersion: "),
        ("kind: FlyerJob\n", "", "job.yaml:1: kind: is missing: write kind: FlyerJob"),
        (
            "nodeClass: a100",
            "nodeClass: a100#A",
            'job.yaml:8: spec.nodeClass: "a100#A" is invalid: it must match',
        ),
        ("{name: gpt}", "{name: GPT}", 'job.yaml:3: metadata.name: "GPT" is invalid'),
        ("{name: gpt}", "{}", "job.yaml:3: metadata.name: is missing: add it"),
        (
            'value: "100"',
            "value: 100",
            "job.yaml:16: spec.template.spec.containers[0].env[0].value: 100 is "
            "not a string: put it",
        ),
        (
            "command: [python, train.py]",
            "command: python train.py",
            "job.yaml:15: spec.template.spec.containers[0].command: ",
        ),
        ("  nodes: 4\n", "  nodes: 4\n  nodes: 5\n", "job.yaml:6: is not YAML: found duplicate"),
        ("{name: gpt}", "{name: gpt", "job.yaml:4: is not YAML: "),
        ("  nodeClass:", "  suspend: yes please\n  nodeClass:", "job.yaml:8: spec.suspend: "),
        (
            "  nodeClass:",
            "  preemption: {checkpointGracePeriod: 20m}\n  nodeClass:",
            "job.yaml:8: spec.preemption: maxCheckpointGracePeriod 10m is shorter than ",
        ),
    ],
)
def test_each_mistake_names_line_field_value_and_remedy(
    before: str, after: str, message: str
) -> None:
    assert before in GOOD
    (problem,) = problems(GOOD.replace(before, after))
    assert problem.startswith(message)


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("ranksPerNod", "did you mean ranksPerNode?"),
        ("ranks_per_node", "did you mean ranksPerNode?"),
        ("RanksPerNode", "did you mean ranksPerNode?"),
        ("gpus", "remove it; the fields here are activeDeadline, checkpoint,"),
    ],
)
def test_an_unknown_field_gets_the_closest_name(field: str, remedy: str) -> None:
    (problem,) = problems(GOOD.replace("ranksPerNode", field))
    assert problem.startswith(f"job.yaml:6: spec.{field}: is not a field of FlyerJob: {remedy}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("group: a100#A", "group: is not a field of FlyerJob: it was renamed, write spec.node"),
        ("watchdog: 5m", "watchdog: is not a field of FlyerJob: it was renamed, write "),
        ("maxRuntime: 2h", "maxRuntime: is not a field of FlyerJob: it was renamed, write "),
        ("preemption: {grace: 9s}", "preemption.grace: is not a field of FlyerJob: it was "),
        ("preemption: {maxGrace: 1h}", "preemption.maxGrace: is not a field of FlyerJob: it "),
        ("crossZone: never", 'crossZone: "never" is not a valid value: did you mean Never?'),
        (
            "crossZone: lastResort",
            'crossZone: "lastResort" is not a valid value: did you mean LastResort?',
        ),
        ("stop: graceful", 'stop: "graceful" is not a valid value: did you mean Graceful?'),
        ("stop: now", 'stop: "now" is not a valid value: did you mean Now?'),
    ],
)
def test_a_retired_name_is_refused_with_the_present_one(line: str, message: str) -> None:
    (problem,) = problems(GOOD.replace("  nodeClass: a100", f"  {line}"))
    assert problem.startswith(f"job.yaml:8: spec.{message}")


def test_all_mistakes_are_reported_together() -> None:
    text = GOOD.replace("nodes: 4", "nodes: 0").replace("24h", "soon").replace("high", "top")
    assert len(problems(text)) == 3


def test_one_invalid_job_invalidates_the_file() -> None:
    (problem,) = problems(GOOD + "---\n" + GOOD.replace("nodes: 4", "nodes: 0"))
    assert problem.startswith("job.yaml:23: spec.nodes: 0")


def test_two_jobs_of_one_name_are_refused() -> None:
    assert "default/gpt appears twice" in problems(GOOD + "---\n" + GOOD)[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "holds no object"),
        ("# nothing\n---\n", "holds no object"),
        ("3", "3 is not an object"),
        ("- a\n- b\n", "is not an object"),
        ("spec: [", "is not YAML"),
        ("a: &x [*x, *x]\n", "apiVersion"),
        ("\x00", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not an object"),
        ("[" * 3000, "is not YAML"),
    ],
)
def test_texts_that_are_not_manifests_are_refused(text: str, why: str) -> None:
    assert why in problems(text)[0]


def test_files_that_are_not_text_or_too_large(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="is not UTF-8"):
        load_manifest(path)
    path.write_bytes(b"#" * (BYTES_MAX + 1))
    with pytest.raises(ManifestError, match="at most"):
        load_manifest(path)
    with pytest.raises(FileNotFoundError):
        load_manifest(tmp_path / "none.yaml")
