"""Any JSON as a template becomes pods, or a refusal that names a field."""

import os
import random

import pytest
from flyer.api import AssignedNode, Assignment, FlyerJob, FlyerJobStatus, JobHistory
from flyer.engine import Start
from flyer.kube.pods import PlacedNode, PodSettings, PodsRefusedError, build_pods
from flyer.kube.pods.fits import NodeFacts, refusals_by_nodes
from pydantic import ValidationError

from fakekube.generators.pod_templates import CONTAINER, any_template

SETTINGS = PodSettings(controller_image="c", collectives_image="l", gateway_ca="x")
SEED = int(os.environ.get("FLYER_SEED", "0")) or random.SystemRandom().randrange(2**32)


def outcome(template, *, dedicated, **fields):
    """`pods`, or the text of the refusal. Anything else raises."""
    body = {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "FlyerJob",
        "metadata": {"name": "j", "namespace": "default", "uid": "u"},
        "spec": {"nodes": 1, "template": template, **fields},
    }
    try:
        job = FlyerJob.model_validate(body)
    except ValidationError as error:
        return ".".join(map(str, error.errors(include_url=False)[0]["loc"])) or "no field"
    job = job.replace(status=FlyerJobStatus(history=JobHistory(id="u")))
    nodes = (AssignedNode(name="node-a", zone="A", first_rank=0),)
    start = Start(job.key, 1, Assignment(epoch=1, nodes=nodes, reserved_at=0.0), None, 0)
    placed = PlacedNode(
        name="node-a", dedicated=dedicated,
        allocatable={"fireflyer.dev/gpu": "8", "fireflyer.dev/rdma-nccl": "1"},
    )  # fmt: skip
    try:
        pods = build_pods(job, start, {"node-a": placed}, SETTINGS)
    except PodsRefusedError as error:
        return str(error)
    assert "nodeName" not in pods[0]["spec"] or not pods[0]["spec"]["nodeName"]
    list(
        refusals_by_nodes([(pods[0]["spec"], NodeFacts("node-a", {"x": "y"}, placed.allocatable))])
    )
    return "pods"


def _check(cases):
    print(f"FLYER_SEED={SEED}")  # shown on failure
    generator = random.Random(SEED)
    counts = {"pods": 0, "refused": 0}
    for _ in range(cases):
        template = any_template(generator)
        try:
            reported = outcome(template, dedicated=generator.random() < 0.5)
        except Exception as error:
            raise AssertionError(f"{template!r}") from error
        assert reported == "pods" or "spec." in reported or "template" in reported, (
            reported,
            template,
        )
        counts["pods" if reported == "pods" else "refused"] += 1
    assert min(counts.values()) > cases / 50, counts  # both outcomes occur


def test_any_template_ends_as_pods_or_a_refusal():
    _check(5_000)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_any_template_many_times():
    _check(100_000)


@pytest.mark.parametrize(
    ("spec", "field", "remedy"),
    [
        ({"nodeName": "a0"}, "spec.template.spec.nodeName", "remove it"),
        ({"topologySpreadConstraints": [{}]}, "topologySpreadConstraints", "remove"),
        ({"resourceClaims": [{"name": "x"}]}, "spec.template.spec.resourceClaims", "gpu"),
        (
            {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}},
            "spec.template.spec.affinity.podAffinity", "remove",
        ),
        (
            {"activeDeadlineSeconds": 1},
            "spec.template.spec.activeDeadlineSeconds", "activeDeadline",
        ),
        (
            {"containers": [CONTAINER | {"restartPolicy": "Always"}]},
            "spec.template.spec.containers[0].restartPolicy", "remove it",
        ),
        (
            {"containers": [CONTAINER | {"restartPolicyRules": [{"action": "Restart"}]}]},
            "spec.template.spec.containers[0].restartPolicyRules", "remove them",
        ),
        ({"tolerations": {"key": "x"}}, "spec.template.spec.tolerations", "expected a list"),
        ({"tolerations": [None]}, "spec.template.spec.tolerations[0]", "expected an object"),
        ({"hostNetwork": "yes"}, "spec.template.spec.hostNetwork", "true or false"),
    ],
)  # fmt: skip
def test_invalid_gangs_are_refused_with_field_and_remedy(spec, field, remedy):
    reported = outcome({"spec": {"containers": [CONTAINER], **spec}}, dedicated=True)
    assert field in reported
    assert remedy in reported


def test_null_is_treated_as_absent():
    spec = {"containers": [CONTAINER | {"resources": {"limits": None}}], "tolerations": None}
    assert outcome({"spec": spec}, dedicated=False) == "pods"
