"""Rules of the CRDs on a real API server: what they refuse, and what they accept."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from flyer.api import crd
from flyer.api.manifest import RENAMED_FIELDS
from flyer.kube.apiserver.errors import ApiError, InvalidError, NotFoundError
from flyer.sim import sample_job

from .real_api import RESOURCES, create_object, delete_object, object_of, send_invalid_edit
from .rule_cases import CASES, NODES, TEMPLATE, TIME, Case, job, status
from .shape_cases import SHAPES, Shape
from .threefs_rule_cases import THREEFS_CASES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flyer.kube.apiserver import Api

    from testcluster.handle import Cluster


ALL_CASES = [*CASES, *THREEFS_CASES]


def schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part with where it is, as the API server writes that: `status.devices[0]`."""
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from schemas(part, f"{path}.{name}" if path else name)
    for name, place in (("items", "[0]"), ("additionalProperties", "[x]")):
        if isinstance(schema.get(name), dict):
            yield from schemas(schema[name], path + place)


def rules() -> list[tuple[str, str, dict[str, Any]]]:
    """Each with its kind and the path that an error is reported at."""
    return [
        (kind.plural, (path + rule.get("fieldPath", "")).removeprefix("."), rule)
        for kind in crd.KINDS
        for version in crd.crd(kind)["spec"]["versions"]
        for path, schema in schemas(version["schema"]["openAPIV3Schema"])
        for rule in schema.get("x-kubernetes-validations", [])
    ]


def test_every_rule_has_a_case_that_breaks_it() -> None:
    for plural, path, rule in rules():
        text = rule["message"]
        if "messageExpression" in rule:
            text = re.fullmatch(r"'(.*)'\.format\(\[.*\]\)", rule["messageExpression"])[1]
        pattern = re.sub(r"%[ds]", ".*", re.escape(text.replace("\\'", "'")))
        assert any(
            re.fullmatch(pattern, case.message)
            for case in ALL_CASES
            if (case.plural, case.path, case.policy) == (plural, path, False)
        ), (plural, path, rule["message"])


def test_every_message_names_a_field_and_a_remedy() -> None:
    for _, path, rule in rules():
        words = rule["message"]
        field = words.partition(": ")[0]
        # A shorter path is that of the parent of the field; device fields have the rest of it.
        assert field.startswith(("spec", "status", "metadata")) or path.endswith(field), rule
        assert re.search(r"(: [a-z]|, [a-z])", words), rule


RULES = [case for case in ALL_CASES if not case.policy]


@pytest.mark.parametrize("case", RULES, ids=[case.name for case in RULES])
async def test_a_rule_refuses_with_a_reason(case: Case, api: Api) -> None:
    name = case.fixed_name or f"case-{secrets.token_hex(4)}"
    await delete_object(api, case.plural, name)
    try:
        with pytest.raises(InvalidError) as refusal:
            await send_invalid_edit(api, api, case, name)
        # The message shows the value unless it is an object.
        where = rf"[ []{re.escape(case.path or '<nil>')}: Invalid value: (\S+: )?"
        assert re.search(where + re.escape(case.message), str(refusal.value))
    finally:
        await delete_object(api, case.plural, name)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
async def test_the_error_of_another_shape_names_the_field(shape: Shape, api: Api) -> None:
    """The part that has no rule: types, bounds, patterns, words, and what has to be there."""
    name = f"shape-{secrets.token_hex(4)}"
    try:
        with pytest.raises(InvalidError) as refusal:
            await create_object(api, shape.plural, name, shape.body)
        assert shape.message in str(refusal.value)
    finally:
        await delete_object(api, shape.plural, name)


@pytest.mark.parametrize("field", RENAMED_FIELDS)
async def test_strict_validation_refuses_the_old_name_of_a_field(field: str, api: Api) -> None:
    name = f"renamed-{secrets.token_hex(4)}"
    body = object_of("flyerjobs", name, job())
    *parents, last = field.split(".")
    parent = body
    for part in parents:
        parent = parent.setdefault(part, {})
    parent[last] = "1m"
    try:
        with pytest.raises(ApiError) as refusal:
            await api.create(RESOURCES["flyerjobs"], body, "default", strict=True)
        assert refusal.value.code == 400
        assert f'strict decoding error: unknown field "{field}"' in str(refusal.value)
        with pytest.raises(NotFoundError):
            await api.get(RESOURCES["flyerjobs"], name, "default")
    finally:
        await delete_object(api, "flyerjobs", name)


async def test_the_status_that_the_engine_writes_is_accepted(api: Api) -> None:
    """A whole life: every status that the rules are about moves along as it should."""
    name = f"life-{secrets.token_hex(4)}"
    await create_object(api, "flyerjobs", name, job())
    starting = status("Starting")
    for step in (
        status("Queued", attempt=0),
        starting,
        status("Running"),
        status("Suspending", suspendCode=3),
        status("Queued", suspendCode=3),
        {**status("Draining", attempt=2), "epoch": 4, "suspendCode": 0},
        {**status("Starting", attempt=2), "epoch": 4},
        {**status("Succeeded", attempt=2), "epoch": 4},
    ):
        current = await api.get(RESOURCES["flyerjobs"], name, "default")
        current["status"] = step
        await api.replace(RESOURCES["flyerjobs"], current, "status")
    await delete_object(api, "flyerjobs", name)


async def test_a_job_that_waits_may_be_changed(api: Api) -> None:
    name = f"waits-{secrets.token_hex(4)}"
    await create_object(api, "flyerjobs", name, job(status=status("Suspended")))
    patch = {"spec": {"nodes": 3, "nodeClass": "a100", "priority": "low", "suspend": True}}
    changed = await api.merge(RESOURCES["flyerjobs"], name, patch, "default")
    assert changed["spec"]["nodes"] == 3
    await delete_object(api, "flyerjobs", name)


async def test_the_token_can_be_released_and_assigned_again(api: Api) -> None:
    holder = {"namespace": "ml", "job": "gpt", "epoch": 4, "since": TIME}
    topologies = RESOURCES["flyertopologies"]
    await delete_object(api, "flyertopologies", "cluster")
    await create_object(api, "flyertopologies", "cluster", {"spec": {}})
    for epoch, holder_value in ((4, holder), (6, None), (6, {**holder, "job": "bert", "epoch": 6})):
        patch = {"status": {"epoch": epoch, "holder": holder_value}}
        await api.merge(topologies, "cluster", patch, "", "status")
    await delete_object(api, "flyertopologies", "cluster")


async def test_defaults_and_null(api: Api) -> None:
    name = f"defaults-{secrets.token_hex(4)}"
    await create_object(api, "flyerjobs", name, job(progressDeadline=None))
    current = await api.get(RESOURCES["flyerjobs"], name, "default")
    assert current["spec"]["progressDeadline"] is None
    assert current["spec"]["preemption"] == {
        "checkpointGracePeriod": "1m",
        "maxCheckpointGracePeriod": "10m",
        "minRuntime": "15m",
    }
    await delete_object(api, "flyerjobs", name)


async def test_columns_and_short_names(kinds: Cluster, api: Api) -> None:
    await create_object(api, "flyerjobs", "column", job())
    await create_object(api, "flyerquotas", "column", {"spec": {"nodes": 4}})
    await create_object(api, "flyertopologies", "cluster", {"spec": {}})
    await create_object(api, "nodehealths", "column", {"spec": {}})
    for short, columns in (
        ("fj", "NAME STATE REASON NODES ZONE PRIORITY PROGRESS RESTARTS AGE"),
        ("fq", "NAME USER NAMESPACE TEAM QUEUE PRIORITY NODE-CLASS USED NODES EXPIRES AGE"),
        ("ft", "NAME CROSS-ZONE HOLDER NAMESPACE AGE"),
        ("nh", "NAME STATE REASON GPUS HCAS VALIDATED DRAINED-BY AGE"),
    ):
        table = await asyncio.to_thread(kinds.kubectl, "get", short, "-n", "default")
        assert " ".join(table.splitlines()[0].split()) == columns
    listed = await asyncio.to_thread(kinds.kubectl, "get", "fireflyer", "-o", "name")
    assert "flyerjob.fireflyer.dev/column" in listed
    for plural in RESOURCES:
        await delete_object(api, plural, "cluster" if plural == "flyertopologies" else "column")


def test_explain_prints_every_description(kinds: Cluster) -> None:
    description = kinds.kubectl("explain", "flyerjob.spec")
    assert "Desired state of the job: its command, its number of nodes" in description
    assert "<no description>" not in kinds.kubectl("explain", "flyerjob", "--recursive")


def test_the_server_accepts_the_samples() -> None:
    """The structural part that needs no server: what Python makes, the schema names."""
    sample = sample_job("one", 2).to_object()
    properties = crd.crd(crd.KINDS[0])["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert set(sample["spec"]) <= set(properties["properties"]["spec"]["properties"])
    assert TEMPLATE["spec"]["containers"][0]["name"] == "trainer"
    assert len(NODES) == 2
