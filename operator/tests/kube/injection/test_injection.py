"""Labelled pods get the collectives; every other pod is allowed unchanged."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from flyer.kube.gateway import certificates_of, renewed
from flyer.kube.injection import InjectionMetrics, Webhook, inject, respond
from flyer.kube.pods import PodSettings
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SETTINGS = PodSettings(
    controller_image="fireflyer/controller:1",
    collectives_image="fireflyer/collectives:1",
    gateway_ca="PEM",
)
OWN = frozenset({"fireflyer-system"})
DATA = renewed(None, ["localhost"], datetime.now(UTC))


def pod(**changes: Any) -> dict[str, Any]:
    container = {"name": "pytorch", "image": "train:1", "env": [{"name": "A", "value": "1"}]}
    body: dict[str, Any] = {
        "metadata": {"name": "w0", "labels": {"fireflyer.dev/inject": "true"}},
        "spec": {"containers": [container]},
    }
    return body | changes


def review(body: object, namespace: str = "lab", operation: str = "CREATE") -> dict[str, Any]:
    request = {
        "uid": "u1",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": namespace,
        "operation": operation,
        "object": body,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def applied(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The pod after the API server has applied the patch."""
    changed = copy.deepcopy(body)
    for change in json.loads(base64.b64decode(answer["response"]["patch"])):
        assert change["op"] == "add"
        _, spec, field = change["path"].split("/")
        assert spec == "spec"
        changed["spec"][field] = change["value"]
    return changed


def test_a_labelled_pod_gets_tools_hfreduce_and_its_environment() -> None:
    answer, result = respond(review(pod()), SETTINGS, OWN)
    assert result == "injected"
    assert answer["response"]["allowed"] is True
    assert answer["response"]["uid"] == "u1"
    spec = applied(pod(), answer)["spec"]
    assert [init_container["name"] for init_container in spec["initContainers"]] == ["flyer-tools"]
    (trainer,) = spec["containers"]
    assert "command" not in trainer
    env = {variable["name"]: variable for variable in trainer["env"]}
    assert env["PYTHONPATH"]["value"] == "/flyer/lib"
    assert env["HFREDUCE_ADDRESS"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert "FLYER_SOCKET" not in env
    assert {volume_mount["mountPath"] for volume_mount in trainer["volumeMounts"]} == {
        "/flyer",
        "/dev/shm",
    }
    assert answer == inject_again(answer)


def test_with_the_daemon_a_pod_gets_its_sidecar_too() -> None:
    review = pod(metadata={"name": "w0", "labels": {"fireflyer.dev/inject": "daemon"}})
    changed, warnings = inject(review, SETTINGS)
    assert warnings == []
    tools, daemon = changed["spec"]["initContainers"]
    assert (tools["name"], daemon["name"]) == ("flyer-tools", "flyer-hfreduced")
    assert daemon["restartPolicy"] == "Always"
    (trainer,) = changed["spec"]["containers"]
    socket = next(
        variable["value"] for variable in trainer["env"] if variable["name"] == "HFREDUCE_DAEMON"
    )
    assert socket in daemon["command"]
    # Both mount the socket's folder.
    for container in (trainer, daemon):
        folders = {
            volume_mount["mountPath"]: volume_mount["name"]
            for volume_mount in container["volumeMounts"]
        }
        assert folders["/run/flyer"] == "flyer-run"
    assert inject(changed, SETTINGS) == (changed, [])
    # A user's volume at its path would hide the socket.
    trainer["volumeMounts"] = [{"name": "mine", "mountPath": "/run/flyer"}]
    _, (warning,) = inject(changed, SETTINGS)
    assert "its own volume at /run/flyer, where hfreduced's socket would be" in warning


def inject_again(answer: dict[str, Any]) -> dict[str, Any]:
    """A second call, after another webhook changed the pod, changes nothing."""
    changed = applied(pod(), answer)
    changed["spec"]["containers"].append({"name": "meshed", "image": "mesh"})
    again, result = respond(review(changed), SETTINGS, OWN)
    assert result == "unchanged"
    assert "patch" not in again["response"]
    return answer


@pytest.mark.parametrize(
    "admission_review",
    [
        review(pod(), namespace="fireflyer-system"),
        review(pod(), operation="UPDATE"),
        review(pod(metadata={"labels": {}})),
        review(pod(metadata={"labels": {"fireflyer.dev/inject": "false"}})),
        review(
            pod(metadata={"labels": {"fireflyer.dev/inject": "true", "fireflyer.dev/job": "x"}})
        ),
        review(None),
        review({"spec": {"containers": []}}),
        review({"spec": "none"}),
    ],
)
def test_pods_without_the_label_are_not_changed(admission_review: dict[str, Any]) -> None:
    answer, result = respond(admission_review, SETTINGS, OWN)
    assert (result, answer["response"]) == ("unchanged", {"uid": "u1", "allowed": True})


def test_only_the_named_container_is_changed() -> None:
    body = pod()
    body["spec"]["containers"].insert(0, {"name": "first", "image": "x"})
    body["metadata"]["annotations"] = {"fireflyer.dev/inject-container": "pytorch"}
    changed, warnings = inject(body, SETTINGS)
    assert warnings == []
    assert "env" not in changed["spec"]["containers"][0]
    body["metadata"]["annotations"] = {"fireflyer.dev/inject-container": "absent"}
    unchanged, warnings = inject(body, SETTINGS)
    assert unchanged == body
    assert "containers: first, pytorch" in warnings[0]


def test_settings_of_the_user_are_kept_with_a_warning() -> None:
    body = pod()
    trainer = body["spec"]["containers"][0]
    trainer["env"] = [{"name": "PYTHONPATH", "value": "/mine"}]
    trainer["volumeMounts"] = [{"name": "mine", "mountPath": "/dev/shm"}]
    changed, (warning,) = inject(body, SETTINGS)
    assert "add /flyer/lib to it" in warning
    after = changed["spec"]["containers"][0]
    assert {"name": "PYTHONPATH", "value": "/mine"} in after["env"]
    assert {"name": "mine", "mountPath": "/dev/shm"} in after["volumeMounts"]
    assert "flyer-shm" not in str(changed)


class Served:
    def __init__(self, webhook: Webhook, registry: CollectorRegistry) -> None:
        self.webhook, self.registry = webhook, registry
        context = ssl.create_default_context(cadata=certificates_of(DATA).bundle)
        self.url = f"https://localhost:{webhook.port}/inject"
        connector = aiohttp.TCPConnector(ssl=context)
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=60)
        )

    async def post(self, body: bytes) -> tuple[int, str]:
        async with self.session.post(self.url, data=body) as response:
            return response.status, await response.text()

    def count(self, result: str) -> float | None:
        return self.registry.get_sample_value("flyer_injections_total", {"result": result})


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    registry = CollectorRegistry()
    webhook = Webhook(
        settings=SETTINGS,
        own_namespaces=OWN,
        metrics=InjectionMetrics(registry),
        host="127.0.0.1",
        port=0,
    )
    webhook.use(certificates_of(DATA))
    serving = asyncio.create_task(webhook.serve())
    async with asyncio.timeout(60):
        await webhook.listening.wait()
    started = Served(webhook, registry)
    yield started
    await started.session.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_over_https(served: Served) -> None:
    status, text = await served.post(json.dumps(review(pod())).encode())
    assert status == 200
    assert applied(pod(), json.loads(text))["spec"]["initContainers"]
    assert served.count("injected") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b"[]",
        b"{}",
        b'{"request": {}}',
        b"[" * 100_000,
        b'{"request": {"uid": "u", "kind": {"kind": "Pod"}, "operation": "CREATE", '
        b'"object": {"metadata": {"labels": {"fireflyer.dev/inject": "true"}}, '
        b'"spec": {"containers": ["odd"]}}}}',
        b"x" * (9 * 1024 * 1024),
    ],
)
async def test_invalid_reviews_are_answered_and_the_pod_is_allowed(
    served: Served, body: bytes
) -> None:
    status, _ = await served.post(body)
    assert status >= 400
    assert served.count("failed") == 1
    status, _ = await served.post(json.dumps(review(pod())).encode())
    assert status == 200


async def test_large_reviews_of_many_sources_wait_for_a_small_one(served: Served) -> None:
    """Each of them takes a second of processor time, and the API server waits for two."""
    large = b'{"request": [' + b"[]," * 50_000 + b"[]]}"
    responses: list[str] = []

    async def post(address: str, body: bytes) -> None:
        connector = aiohttp.TCPConnector(local_addr=(address, 0), ssl=False)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(served.url, data=body) as response,
        ):
            await response.read()
        responses.append(address)

    reached = asyncio.Semaphore(0)
    acquire = served.webhook._semaphore.acquire

    def counted_acquire(source: str, cost: int = 1) -> Any:
        reached.release()
        return acquire(source, cost)

    served.webhook._semaphore.acquire = counted_acquire  # type: ignore[method-assign]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group, acquire("running"):
        for number in range(6):
            group.create_task(post(f"127.0.0.{number + 2}", large))
            await reached.acquire()
        group.create_task(post("127.0.0.1", json.dumps(review(pod())).encode()))
        await reached.acquire()
        await asyncio.sleep(0)  # the last one waits for its turn
    assert served.count("injected") == 1
    assert responses[0] == "127.0.0.1"
