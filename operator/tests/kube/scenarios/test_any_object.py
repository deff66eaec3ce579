"""Random values in fields of Fire-Flyer's objects, pods and nodes affect nothing else.

Each case writes one object to the in-memory API server, with its CRDs and policies. It ends as a
refusal that names a field, or the operator reads it: a job then becomes pods or a refusal that
names a field, and the engine steps with it. After every few cases a valid job must start among
the accepted objects. The seed is printed; FLYER_SEED=N repeats a run.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections import Counter
from typing import Any

import pytest
from flyer import engine
from flyer.api import (
    AssignedNode,
    Assignment,
    FlyerJob,
    FlyerJobStatus,
    FlyerQuota,
    FlyerTopology,
    JobHistory,
    NodeHealth,
    Phase,
)
from flyer.engine import (
    JobRemoved,
    JobSubmitted,
    NodeEmptied,
    PodExited,
    Quota,
    QuotaObserved,
    QuotaRemoved,
    SchedulerSettings,
    Start,
    Succeeded,
    Zones,
    ZonesObserved,
)
from flyer.kube.cache.job_view import shape_job
from flyer.kube.cache.node_view import shape_node
from flyer.kube.cache.pod_view import shape_pods
from flyer.kube.gateway import outcome_of
from flyer.kube.pods import PlacedNode, PodSettings, PodsRefusedError, build_pods
from pydantic import ValidationError

from fakekube import Store
from fakekube.apiserver.admission import Admission, Request, User
from fakekube.apiserver.paths import ObjectPath
from fakekube.errors import ApiRefusal
from fakekube.generators.objects import any_metadata, any_object, any_typed
from fakekube.generators.samples import job_object
from fakekube.validation.podschema import decode_pod

SEED = int(os.environ.get("FLYER_SEED", "0")) or random.SystemRandom().randrange(2**32)
SETTINGS = PodSettings(controller_image="c", collectives_image="l", gateway_ca="ca")
PLACED = PlacedNode(
    name="a0", dedicated=True,
    allocatable={"cpu": "64", "memory": "512Gi", "fireflyer.dev/gpu": "8"},
)  # fmt: skip
FIELDS = ("spec", "metadata", "status", "apiVersion", "kind")
BATCH = 25
STEPS_MAX = 60


class Scene:
    """A store with policies, and an engine that runs accepted jobs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = Store()
        self.ends: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        self._admission = Admission(self.store)
        nodes = [engine.Node(f"a{index}", "A", slots=8) for index in range(4)]
        self.now = 1000.0
        self.state = engine.rebuild(nodes, (), self.now, 1, SchedulerSettings())

    def step(self, *events: Any) -> list[Start]:
        """Step the engine. Returns the gangs to start."""
        self.now += 1.0
        self.state, actions = engine.step(self.state, events, self.now)
        return [action for action in actions if isinstance(action, Start)]

    def write(self, plural: str, value: dict[str, Any]) -> dict[str, Any] | None:
        """The stored object; None: it was refused, naming a field."""
        body = copy.deepcopy(value)
        status = body.pop("status", None)
        name, namespace = body["metadata"]["name"], "default" if plural == "flyerjobs" else ""
        target = ObjectPath("fireflyer.dev", "v1alpha1", plural, namespace, name)
        request = Request("CREATE", target, name, User("anna"))
        admit = self._admission.gate(lambda *_: request)
        try:
            stored = self.store.create(plural, body, admit=admit)
            if status is not None:
                patch = {"status": status}
                stored = self.store.patch(plural, name, patch, namespace, "status")
        except ApiRefusal as error:
            refusal = error
        else:
            return stored
        assert any(field in str(refusal) for field in FIELDS), str(refusal)
        assert refusal.code in (400, 403, 422), refusal.code
        return None

    def clear(self, plural: str) -> None:
        for table in (self.store.table(plural),):
            table.entries.clear()


def job_case(scene: Scene, number: int) -> str:
    value = any_object(scene.random, "flyerjobs", f"any-{number}")
    stored = scene.write("flyerjobs", value)
    if stored is None:
        # It may have been stored under an older definition.
        view = shape_job({**value, "metadata": {**value["metadata"], "uid": "u"}})
        assert view.job is not None or view.problem or "managedBy" in value["spec"]
        return "refused"
    view = shape_job(stored)
    if view.job is None:
        assert not view.problem, view.problem
        return "of another controller"
    job = parsed(stored)
    if job is None or not can_build(job):
        return "template refused"
    for start in scene.step(JobSubmitted(view.job)):
        finish(scene, start)
    return "runs"


def parsed(value: dict[str, Any]) -> FlyerJob | None:
    """The CRD does not specify the template's schema: the operator reports its errors."""
    try:
        return FlyerJob.model_validate(value)
    except ValidationError as error:
        places = [item["loc"][:2] for item in error.errors()]
    assert set(places) == {("spec", "template")}, places
    return None


def can_build(job: FlyerJob) -> bool:
    """Whether pods can be built. Raises unless a refusal names the field."""
    ready = job.replace(status=FlyerJobStatus(history=JobHistory(id="u")))
    nodes = tuple(AssignedNode(name="a0", zone="A", first_rank=0) for _ in range(1))
    assignment = Assignment(epoch=1, nodes=nodes, reserved_at=0.0)
    try:
        pods = build_pods(ready, Start(job.key, 1, assignment, None, 0), {"a0": PLACED}, SETTINGS)
    except PodsRefusedError as error:
        reasons = error.reasons
    else:
        with contextlib.suppress(ApiRefusal):  # as a refused dry run, with the field's path
            decode_pod(pods[0], strict=True)
            return True
        return False
    assert all("spec." in reason or "metadata" in reason for reason in reasons), reasons
    return False


def finish(scene: Scene, *starts: Start) -> None:
    """Every gang succeeds as soon as it starts."""
    waiting = list(starts)
    for _ in range(STEPS_MAX):
        if not waiting:
            return
        start = waiting.pop()
        names = start.assignment.names
        waiting += scene.step(*(PodExited(start.job, start.attempt, name, Succeeded())
                                for name in names))  # fmt: skip
        waiting += scene.step(*(NodeEmptied(name, start.job, start.attempt) for name in names))


def quota_case(scene: Scene, number: int) -> str:
    stored = scene.write("flyerquotas", any_object(scene.random, "flyerquotas", f"any-{number}"))
    if stored is None:
        return "refused"
    quota = Quota.of(FlyerQuota.model_validate(stored))
    for start in scene.step(QuotaObserved(quota)):
        finish(scene, start)
    scene.step(QuotaRemoved(quota.name))
    return "read"


def topology_case(scene: Scene, number: int) -> str:
    scene.clear("flyertopologies")
    value = any_object(scene.random, "flyertopologies", "cluster")
    stored = scene.write("flyertopologies", value)
    if stored is None:
        return "refused"
    for start in scene.step(ZonesObserved(Zones.of(FlyerTopology.model_validate(stored)))):
        finish(scene, start)
    scene.step(ZonesObserved(Zones()))
    scene.clear("flyertopologies")
    return "read"


def health_case(scene: Scene, number: int) -> str:
    half = scene.random.choice(("spec", "status", "status"))
    value = any_object(scene.random, "nodehealths", f"any-{number}", half)
    stored = scene.write("nodehealths", value)
    if stored is None:
        return "refused"
    health = NodeHealth.model_validate(stored)
    assert isinstance(health.unfit, str)
    assert isinstance(health.unproven, bool)
    assert health.fault is None or health.fault is not health
    return "read"


CASES = {
    "flyerjobs": job_case,
    "flyerquotas": quota_case,
    "flyertopologies": topology_case,
    "nodehealths": health_case,
}


def next_starts(scene: Scene, number: int) -> None:
    """A valid job gets nodes among the accepted objects."""
    body = {**job_object(f"next-{number}", priority="extreme-high")}
    body["metadata"] |= {"uid": f"next-{number}", "namespace": "default"}
    job = FlyerJob.model_validate(body)
    starts = scene.step(JobSubmitted(job))
    for _ in range(STEPS_MAX):
        if any(start.job == job.key for start in starts):
            break
        finish(scene, *starts)
        scene.now += 10.0
        starts = scene.step(engine.Tick())
    else:
        raise AssertionError(f"{job.key} did not start: {scene.state.jobs[job.key].status}")
    finish(scene, *starts)
    assert scene.state.jobs[job.key].status.phase is Phase.SUCCEEDED
    scene.step(*(JobRemoved(key) for key in scene.state.jobs))
    scene.clear("flyerjobs")
    scene.clear("flyerquotas")
    scene.clear("nodehealths")
    scene.restart()


def check(cases: int) -> None:
    print(f"FLYER_SEED={SEED}")  # shown on failure
    scene = Scene(SEED)
    plurals = ("flyerjobs", "flyerjobs", "flyerquotas", "flyertopologies", "nodehealths")
    for number in range(cases):
        plural = scene.random.choice(plurals)
        try:
            end = CASES[plural](scene, number)
        except Exception as error:
            raise AssertionError(f"case {number}, {plural}") from error
        scene.ends[f"{plural} {end}"] += 1
        if number % BATCH == BATCH - 1:
            next_starts(scene, number)
    for reason in (
        "flyerjobs runs", "flyerjobs refused", "flyerjobs template refused", "flyerquotas read",
        "flyerquotas refused", "flyertopologies read", "flyertopologies refused",
        "nodehealths read", "nodehealths refused",
    ):  # fmt: skip
        assert scene.ends[reason] > cases / 1000, scene.ends


@pytest.mark.timeout(400)
def test_any_value_is_parsed_or_the_error_names_its_field() -> None:
    check(5_000)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_any_field_many_times() -> None:
    check(100_000)


# -- pods and nodes ------------------------------------------------------------------------------


def look(cases: int) -> None:
    """The operator reads every pod and node that an API server can store."""
    print(f"FLYER_SEED={SEED}")
    generator = random.Random(SEED)
    shape = shape_pods(outcome_of)
    counts: Counter[str] = Counter()
    for number in range(cases):
        owner = {"apiVersion": "fireflyer.dev/v1alpha1", "kind": "FlyerJob", "name": "job",
                 "uid": "u", "controller": True}  # fmt: skip
        metadata = any_metadata(generator, ("u",)) | {
            "name": generator.choice(
                ("job-1-0", "job-0-0", "job-01-0", f"job-{'9' * 60}-1", "job-٣-٣", "job-1", "x")
            ),
            "namespace": "default", "uid": f"u{number}", "resourceVersion": "1",
        }  # fmt: skip
        if generator.random() < 0.5:
            metadata["ownerReferences"] = [owner]
        pod = {"spec": {"containers": []}, **any_typed(generator, "V1Pod"), "metadata": metadata}
        node = {**any_typed(generator, "V1Node"), "metadata": metadata}
        try:
            pod_view, view = shape(pod), shape_node(node)
        except Exception as error:
            raise AssertionError(f"{pod!r} or {node!r}") from error
        counts["ours" if pod_view is not None else "not ours"] += 1
        assert pod_view is None or (pod_view.owner and pod_view.attempt < 10**10), pod_view
        assert view.node.slots >= 0
    assert min(counts["ours"], counts["not ours"]) > cases / 20, counts


def test_any_pod_and_any_node_can_be_read() -> None:
    look(5_000)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_any_pod_and_any_node_many_times() -> None:
    look(100_000)
