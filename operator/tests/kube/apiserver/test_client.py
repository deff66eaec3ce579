"""API calls: retries, error types and deadlines."""

import asyncio

import pytest
from flyer.kube.apiserver.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    OverloadedError,
    UnreachableError,
    error_of,
)
from flyer.kube.apiserver.resources import CLAIMS, FLYERJOBS, NODES, PODS

from fakekube import Fault
from fakekube.generators.samples import job_object as job


@pytest.mark.parametrize(
    "fault",
    [
        Fault("refuse", code=429, reason="TooManyRequests", retry_after_seconds=0, times=2),
        Fault("refuse", code=500, times=3),
        Fault("refuse", code=503, reason="ServiceUnavailable"),
        Fault("drop", times=2),
        Fault("hang"),
    ],
)
async def test_temporary_errors_are_retried(api_server, connect, fault):
    api = connect(answer_seconds=3.0)  # the first answer may take a second on a busy host
    api_server.faults.add(fault)
    created = await api.create(FLYERJOBS, job("a"), "default")
    assert created["metadata"]["uid"]
    assert fault.times == 0


async def test_retries_end_at_the_deadline(api_server, connect):
    # Each answer arrives in time, also on a busy host.
    api = connect(call_seconds=2.0)
    api_server.faults.add(Fault("refuse", code=500, times=1000, verb="get"))
    with pytest.raises(OverloadedError, match=r"get nodes n \(500"):
        await api.get(NODES, "n")
    api = connect(answer_seconds=0.1, call_seconds=0.5)
    api_server.faults.add(Fault("hang", times=1000, verb="list"))
    with pytest.raises(UnreachableError, match="timed out"):
        await api.list(NODES)


async def test_a_proxy_of_the_environment_is_not_used(api_server, connect, monkeypatch):
    """As in the install guide: the network policies allow no connection to a proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            monkeypatch.setenv(
                variable, "http://127.0.0.1:9"
            )  # the discard port, on which no process listens
    api = connect(call_seconds=5.0)
    assert (await api.create(FLYERJOBS, job("a"), "default"))["metadata"]["uid"]
    assert [item async for page in api.snapshot(FLYERJOBS) for item in page.items]


async def test_waiting_for_a_slot_does_not_shorten_the_deadline_of_a_call(api_server, connect):
    api, leave = connect(call_seconds=2.0, concurrency_max=1), asyncio.Event()

    async def occupy():
        async with api._slots:
            await leave.wait()

    before = asyncio.create_task(occupy())
    await asyncio.sleep(0)
    api_server.faults.add(Fault("refuse", code=503, verb="create"))
    call = asyncio.create_task(api.create(FLYERJOBS, job("a"), "default"))
    await asyncio.sleep(2.1)  # longer than the call's deadline
    leave.set()
    assert (await call)["metadata"]["uid"]
    await before


async def test_retry_after_is_respected(api_server, connect):
    api = connect(call_seconds=60.0)
    api_server.faults.add(Fault("refuse", code=429, retry_after_seconds=3600))
    with pytest.raises(OverloadedError) as raised:
        await api.list(NODES)
    assert raised.value.retry_after_seconds == 3600


async def test_a_retry_after_a_lost_response_reports_the_effect_of_the_call(api_server, connect):
    api = connect()
    api_server.faults.add(Fault("lose", verb="create"))
    with pytest.raises(AlreadyExistsError):
        await api.create(FLYERJOBS, job("a"), "default")
    version = api_server.store.get("flyerjobs", "a", "default")["metadata"]["resourceVersion"]
    patch = {"metadata": {"resourceVersion": version}, "status": {"phase": "Queued"}}
    api_server.faults.add(Fault("lose", verb="patch"))
    with pytest.raises(ConflictError):
        await api.merge(FLYERJOBS, "a", patch, "default", "status")
    api_server.faults.add(Fault("lose", verb="delete"))
    with pytest.raises(NotFoundError):
        await api.delete(FLYERJOBS, "a", "default")


POLICY = "denied request: failed to configure policy: failed to find resource referenced by"
ACCOUNT = 'is forbidden: error looking up service account new/default: serviceaccount "default"'


@pytest.mark.parametrize(
    "words",
    [f"ValidatingAdmissionPolicy 'x' {POLICY} paramKind: 'x/v1, Kind=X'", f"{ACCOUNT} not found"],
)
async def test_temporary_admission_errors_are_retried(api_server, connect, words):
    answers = [words] * 2
    checks = api_server.store.table("flyerjobs").checks
    checks.append(lambda _before, _after: answers.pop() if answers else None)
    await connect().create(FLYERJOBS, job("a"), "default")
    assert not answers


@pytest.mark.parametrize(
    ("words", "lasting"),
    [
        ('pods "p" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1', True),
        ('pods "p" is forbidden: failed quota: q: must specify limits.cpu', True),
        ('pods "p" is forbidden: violates PodSecurity "restricted:latest": privileged', True),
        ("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no", True),
        ('admission webhook "w" denied the request: no', True),
        ('pods "p" is forbidden: maximum cpu usage per Container is 1, but limit is 2', True),
        ('pods "p" is forbidden: status unknown for quota: q, resources: pods', False),
        ('pods "p" is forbidden: error looking up service account a/b: not found', False),
        ('User "o" cannot create resource "pods" in API group "" in the namespace "a"', False),
        ("Unauthorized", False),
    ],
)
def test_refusals_by_quotas_and_policies_last(words, lasting):
    error = error_of("create pods", 403, "Forbidden", words)
    assert isinstance(error, ForbiddenError)
    assert error.lasting is lasting


async def test_permanent_errors_are_raised_immediately(api_server, connect):
    api = connect()
    with pytest.raises(NotFoundError, match="flyerjobs default/a"):
        await api.get(FLYERJOBS, "a", "default")
    api_server.store.table("flyerjobs").checks.append(lambda _before, _after: "spec.nodes: is odd")
    with pytest.raises(InvalidError, match=r"spec\.nodes: is odd"):
        await api.create(FLYERJOBS, job("a"), "default")
    api_server.store.create("namespaces", {"metadata": {"name": "ends"}})
    api_server.store.delete("namespaces", "ends")
    with pytest.raises(ForbiddenError, match="being terminated"):
        await api.create(PODS, {"metadata": {"name": "p"}, "spec": {}}, "ends")


@pytest.mark.parametrize("name", ["../../other/pods/x", "a/b", ".", "..", "%2e%2e", "a%2fb"])
async def test_invalid_names_are_not_requested(api_server, connect, name):
    api = connect()
    with pytest.raises(NotFoundError, match="invalid name"):
        await api.get(CLAIMS, name, "default")
    assert not api_server.faults.calls


async def test_a_name_stays_in_the_path(api_server, connect):
    api = connect()
    with pytest.raises(NotFoundError):
        await api.get(CLAIMS, "a?b#c", "default")
    assert [call.name for call in api_server.faults.calls] == ["a?b#c"]


async def test_concurrent_calls_are_limited(api_server, connect):
    api = connect(concurrency_max=3)
    under_way = most = 0
    real = api_server._perform

    def perform(*arguments):
        nonlocal most
        most = max(most, under_way)
        return real(*arguments)

    api_server._perform = perform
    api_server.faults.add(Fault("delay", seconds=0.02, times=12))
    slots = api._slots

    async def create_job(index):
        nonlocal under_way
        await api.create(FLYERJOBS, job(f"j{index}"), "default")

    tasks = [asyncio.create_task(create_job(index)) for index in range(12)]
    await asyncio.sleep(0.01)
    assert slots.locked()
    await asyncio.gather(*tasks)
    assert len(api_server.store.all("flyerjobs")) == 12


async def test_lists_are_read_in_pages(api_server, connect):
    for index in range(7):
        api_server.store.create("flyerjobs", job(f"j{index}"), "default")
    items = await connect(page_objects=3).list(FLYERJOBS)
    assert [match["metadata"]["name"] for match in items] == [f"j{index}" for index in range(7)]
    assert sum(call.verb == "list" for call in api_server.faults.calls) == 3
