"""Golden files: the pods built for a job are compared with stored manifests.

`GOLDEN=write` rewrites the files; review the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import (
    AssignedNode,
    Assignment,
    FlyerJob,
    FlyerJobStatus,
    JobHistory,
    PodTemplate,
    load_manifest,
)
from flyer.engine import Start
from flyer.kube.pods import PlacedNode, PodSettings, PodsRefusedError, build_pods, refusals
from flyer.kube.pods.names import host_name, label_value
from flyer.kube.settings import Settings
from ruamel.yaml import YAML

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parent / "golden"
SETTINGS = PodSettings(
    controller_image="fireflyer/controller:1",
    collectives_image="fireflyer/collectives:1",
    gateway_ca="-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n",
    image_pull_secrets=("ours",),
)
ALLOCATABLE = {"fireflyer.dev/gpu": "8", "fireflyer.dev/rdma-hfreduce": "4", "cpu": "64"}


def job_of(text: str) -> FlyerJob:
    (job,) = load_manifest(text)
    return job.replace(status=FlyerJobStatus(history=JobHistory(id=job.metadata.uid or "")))


def start_of(job: FlyerJob, zones: str = "AB", attempt: int = 3) -> Start:
    nodes = tuple(
        AssignedNode(name=f"{zone.lower()}{i}", zone=zone, first_rank=i * job.spec.ranks_per_node)
        for i, zone in enumerate(zones[: job.spec.nodes])
    )
    assignment = Assignment(epoch=1, nodes=nodes, cross_zone_pair=(), reserved_at=0.0)
    return Start(job.key, attempt, assignment, None, 0)


def build(
    job: FlyerJob, *, dedicated: bool = True, settings: PodSettings = SETTINGS
) -> list[dict[str, Any]]:
    start = start_of(job)
    nodes = {
        name: PlacedNode(name=name, dedicated=dedicated, allocatable=ALLOCATABLE)
        for name in start.assignment.names
    }
    return build_pods(job, start, nodes, settings)


def compare(pods: list[dict[str, Any]], path: Path) -> None:
    yaml = YAML()
    if os.environ.get("GOLDEN") == "write":
        with path.open("w") as file:
            yaml.dump_all(pods, file)
    assert list(YAML(typ="safe").load_all(path.read_text())) == pods, path.name


@pytest.mark.parametrize(
    ("name", "dedicated"), [("small", True), ("small", False), ("full", True), ("full", False)]
)
def test_the_pods_are_those_of_the_golden_file(name: str, dedicated: bool) -> None:
    job = job_of((GOLDEN / f"{name}.job.yaml").read_text())
    place = "dedicated" if dedicated else "shared"
    compare(build(job, dedicated=dedicated), GOLDEN / f"{name}.{place}.yaml")


def test_pods_have_the_operators_priority_class_unless_their_template_names_one() -> None:
    settings = PodSettings.of(Settings(job_priority_class="training"), "ca")
    job = job_of((GOLDEN / "small.job.yaml").read_text())
    (pod, *_) = build(job, settings=settings)
    assert pod["spec"]["priorityClassName"] == "training"
    template = job.spec.template.to_object()
    template["spec"]["priorityClassName"] = "batch"
    spec = job.spec.replace(template=PodTemplate.model_validate(template))
    (pod, *_) = build(job.replace(spec=spec), settings=settings)
    assert pod["spec"]["priorityClassName"] == "batch"


def test_build_is_deterministic_and_leaves_the_job_unchanged() -> None:
    job = job_of((GOLDEN / "full.job.yaml").read_text())
    before = job.to_object()
    assert build(job) == build(job)
    assert job.to_object() == before


def small() -> dict[str, Any]:
    return YAML(typ="safe").load((GOLDEN / "small.job.yaml").read_text())


def changed(change: Callable[[dict[str, Any]], object]) -> FlyerJob:
    body = small()
    change(body["spec"]["template"]["spec"])
    return FlyerJob.model_validate(body)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda spec: spec["containers"][0].pop("command"),
            "spec.template.spec.containers[0].command: missing: the image's entrypoint "
            "cannot be started once per rank, so set the command, for example [python, train.py]",
        ),
        (
            lambda spec: spec["containers"][0].pop("image"),
            "spec.template.spec.containers[0].image: missing: ",
        ),
        (
            lambda spec: spec.update(restartPolicy="Always"),
            'spec.template.spec.restartPolicy: is "Always": ',
        ),
        (
            lambda spec: spec.update(initContainers=[{"name": "flyer-tools"}]),
            'spec.template.spec.initContainers[0].name: "flyer-tools" is added by Fire-Flyer',
        ),
        (
            lambda spec: spec.update(initContainers=[{"name": "flyer-hfreduced"}]),
            'spec.template.spec.initContainers[0].name: "flyer-hfreduced" is added by Fire-Flyer',
        ),
        (
            lambda spec: spec.update(volumes=[{"name": "flyer-run", "emptyDir": {}}]),
            'spec.template.spec.volumes[0].name: "flyer-run": names that start with "flyer-"',
        ),
        (
            lambda spec: spec["containers"][0].update(
                volumeMounts=[{"name": "x", "mountPath": "/flyer/"}]
            ),
            'spec.template.spec.containers[0].volumeMounts: "/flyer" is where Fire-Flyer keeps',
        ),
    ],
)
def test_templates_that_cannot_run_are_refused_with_field_value_and_remedy(
    change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    job = changed(change)
    (reason,) = refusals(job)
    assert reason.startswith(expected)
    with pytest.raises(PodsRefusedError) as excinfo:
        build(job)
    assert excinfo.value.reasons == [reason]


@pytest.mark.parametrize("kind", ["labels", "annotations"])
@pytest.mark.parametrize("key", ["fireflyer.dev/leader", "fireflyer.dev/job", "x.fireflyer.dev/y"])
def test_keys_of_our_domain_are_refused(kind: str, key: str) -> None:
    job = changed(lambda _spec: None)
    template = job.spec.template
    metadata = template.metadata.replace(**{kind: {"team": "vision", key: "true"}})
    template = template.replace(metadata=metadata)
    (reason,) = refusals(job.replace(spec=job.spec.replace(template=template)))
    assert reason.startswith(f"spec.template.metadata.{kind}[{key}]: ")
    assert "remove it" in reason


def test_resources_that_the_node_lacks_are_not_requested() -> None:
    job = job_of((GOLDEN / "small.job.yaml").read_text())
    start = start_of(job)
    nodes = {name: PlacedNode(name=name) for name in start.assignment.names}
    for pod in build_pods(job, start, nodes, SETTINGS):
        assert "resources" not in pod["spec"]["containers"][0]


def test_without_injection_pods_have_no_traffic_class_and_no_shared_memory() -> None:
    body = small()
    body["spec"]["collectives"] = {"inject": False}
    (pod, _) = build(FlyerJob.model_validate(body))
    trainer = pod["spec"]["containers"][0]
    assert trainer["resources"]["limits"] == {"fireflyer.dev/gpu": "8"}
    assert all(volume_mount["mountPath"] != "/dev/shm" for volume_mount in trainer["volumeMounts"])


@pytest.mark.parametrize(
    ("grace_seconds", "max_checkpoint_grace", "expected"),
    [(0, "10m", 1), (-5, "10m", 1), (None, "0s", 1), (30, "0s", 1), (30, "10m", 30)],
)
def test_no_pod_is_removed_before_its_processes_have_ended(
    grace_seconds: int | None, max_checkpoint_grace: str, expected: int
) -> None:
    """With a grace period of 0 the API server removes a deleted pod immediately."""
    body = small()
    if grace_seconds is not None:
        body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = grace_seconds
    body["spec"]["preemption"] = {
        "checkpointGracePeriod": "0s",
        "maxCheckpointGracePeriod": max_checkpoint_grace,
        "minRuntime": "0s",
    }
    for pod in build(FlyerJob.model_validate(body)):
        assert pod["spec"]["terminationGracePeriodSeconds"] == expected


@pytest.mark.parametrize(
    ("network", "policy", "expected"),
    [
        (True, None, "ClusterFirstWithHostNet"),
        (True, "ClusterFirst", "ClusterFirstWithHostNet"),
        (True, "None", "None"),
        (False, None, None),
        (False, "ClusterFirst", "ClusterFirst"),
    ],
)
def test_the_sidecar_of_a_pod_on_its_nodes_network_finds_the_gateways_service(
    network: bool, policy: str | None, expected: str | None
) -> None:
    body = small()
    spec = body["spec"]["template"]["spec"]
    spec["hostNetwork"] = network
    if policy is not None:
        spec["dnsPolicy"] = policy
    for pod in build(FlyerJob.model_validate(body)):
        assert pod["spec"].get("dnsPolicy") == expected


def test_the_daemon_is_a_sidecar_reachable_only_from_its_pod() -> None:
    body = small()
    without = build(FlyerJob.model_validate(body))
    body["spec"]["collectives"] = {"daemon": True}
    job = FlyerJob.model_validate(body)
    for pod, plain in zip(build(job), without, strict=True):
        spec = pod["spec"]
        daemon = spec["initContainers"].pop()
        trainer = spec["containers"][0]
        path = {"name": "HFREDUCE_DAEMON", "value": "/run/flyer/hfreduced.sock"}
        trainer["env"].remove(path)
        assert pod == plain, "nothing else changes"
        assert daemon["image"] == SETTINGS.collectives_image
        assert daemon["restartPolicy"] == "Always"
        assert daemon["command"][:3] == ["hfreduced", "--socket", path["value"]]
        assert daemon["startupProbe"]["exec"]["command"] == ["test", "-S", path["value"]]
        assert daemon["securityContext"]["runAsNonRoot"] is True
        (mount,) = daemon["volumeMounts"]
        assert mount in trainer["volumeMounts"], "both containers mount the same folder"
        (volume,) = [item for item in spec["volumes"] if item["name"] == mount["name"]]
        assert "emptyDir" in volume, "no other pod shares it"


def test_the_daemon_address_that_the_user_sets_is_kept() -> None:
    body = small()
    body["spec"]["collectives"] = {"daemon": True}
    variable = {"name": "HFREDUCE_DAEMON", "value": ""}
    body["spec"]["template"]["spec"]["containers"][0]["env"] = [variable]
    (pod, _) = build(FlyerJob.model_validate(body))
    variables = [e for e in pod["spec"]["containers"][0]["env"] if e["name"] == "HFREDUCE_DAEMON"]
    assert variables == [variable]


def test_a_daemon_without_injected_collectives_is_refused() -> None:
    body = small()
    body["spec"]["collectives"] = {"inject": False, "daemon": True}
    with pytest.raises(ValueError, match="daemon: is part of what inject adds"):
        FlyerJob.model_validate(body)


def test_names_and_labels_stay_within_63_characters() -> None:
    assert host_name("gpt", 2, 511) == "gpt-2-511"
    long = host_name("x" * 63, 12, 511)
    assert len(long) <= 63
    assert long != host_name("x" * 62 + "y", 12, 511)
    assert label_value("lab/gpt") == "lab.gpt"
    assert len(label_value("x" * 100)) == 63


def test_the_additions_pass_pod_security_restricted() -> None:
    job = job_of((GOLDEN / "small.job.yaml").read_text())
    for pod in build(job):
        spec = pod["spec"]
        for container in spec["initContainers"]:
            context = container["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all({"emptyDir", "projected"} & volume.keys() for volume in spec["volumes"])
