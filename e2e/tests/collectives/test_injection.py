"""The injection webhook, called by a real API server as the chart registers it.

Without nodes the webhook runs in this process. On kubelets it is the chart's, and the pod runs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from flyer.kube.gateway import certificates_of, renewed
from flyer.kube.injection import INJECTION_PATH, Webhook
from flyer.kube.pods import PodSettings

from charts import helm
from charts.generate import CHART
from e2e.lib.chart import NAMESPACE
from e2e.lib.pods import TRAIN_IMAGE
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.lib import chart
    from testcluster.handle import Cluster

LABEL = {"fireflyer.dev/inject": "true"}
TOOLS = "flyer-tools"
SECONDS = 180.0


def pod(name: str, **labels: str) -> dict[str, Any]:
    """A training pod of a third-party operator."""
    command = ["python3", "-c", "import hfreduce; print('hfreduce is', hfreduce.__file__)"]
    container = {"name": "pytorch", "image": TRAIN_IMAGE, "command": command}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }


def sums_by_daemon(name: str) -> dict[str, Any]:
    """A training pod of one rank, whose sidecar runs its allreduces."""
    script = (
        "import array, os, hfreduce, hfreduce.standalone\n"
        "os.environ.update(RANK='0', WORLD_SIZE='1')\n"
        "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='29500')\n"
        "group = hfreduce.standalone.connect(os.environ)\n"
        "numbers = array.array('f', [3.0] * 1000)\n"
        "hfreduce.allreduce(numbers, group)\n"
        "group.close()\n"
        "print('sum', numbers[999], 'by', os.environ['HFREDUCE_DAEMON'])\n"
    )
    pod_object = pod(name, **{"fireflyer.dev/inject": "daemon"})
    pod_object["spec"]["containers"][0]["command"] = ["python3", "-c", script]
    return pod_object


def inits(created: dict[str, Any]) -> list[str]:
    """The init containers that the API server stored."""
    return [container["name"] for container in created["spec"].get("initContainers", [])]


def configuration() -> dict[str, Any]:
    """The webhook configuration of the chart, as JSON."""
    template = (helm.find(), "template", "fire-flyer", str(CHART), f"--namespace={NAMESPACE}")
    result = subprocess.run(
        [
            *template,
            "--set=images.registry=registry.example,images.allowTags=true",
            "--show-only=templates/operator/webhook.yaml",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    config: dict[str, Any] = yaml.safe_load(result.stdout)
    return config


@pytest.fixture
def webhook_name(control_plane: Cluster) -> Iterator[str]:
    """A separate webhook registration, removed after the test."""
    name = f"test-{os.urandom(4).hex()}"
    yield name
    control_plane.kubectl("delete", "mutatingwebhookconfiguration", name, "--ignore-not-found")


async def test_a_real_server_calls_it_and_continues_without_it(
    control_plane: Cluster, namespace: str, webhook_name: str
) -> None:
    certificates = certificates_of(renewed(None, ["127.0.0.1"], datetime.now(UTC)))
    webhook = Webhook(
        settings=PodSettings(controller_image="c", collectives_image="tools:1", gateway_ca="ca"),
        own_namespaces=frozenset({NAMESPACE}),
        host="127.0.0.1",
        port=0,
    )
    webhook.use(certificates)
    serving = asyncio.create_task(webhook.serve())
    await webhook.listening.wait()

    registered = configuration()
    registered["metadata"] = {"name": webhook_name}
    registered["webhooks"][0]["clientConfig"] = {
        "url": f"https://127.0.0.1:{webhook.port}{INJECTION_PATH}",
        "caBundle": base64.b64encode(certificates.bundle.encode()).decode(),
    }

    def create(pod_object: dict[str, Any], where: str = namespace) -> dict[str, Any]:
        words = ("create", f"--namespace={where}", "-f", "-", "--output=json")
        created: dict[str, Any] = json.loads(
            control_plane.kubectl(*words, stdin=json.dumps(pod_object))
        )
        return created

    def kubectl_until_it_is_called() -> bool:
        dry = {**pod("probe", **LABEL)}
        words = ("create", f"--namespace={namespace}", "-f", "-", "--output=json")
        text = control_plane.kubectl(*words, "--dry-run=server", stdin=json.dumps(dry))
        return inits(json.loads(text)) == [TOOLS]

    def story_while_it_serves() -> None:
        wait_for(
            "the service account that pods get",
            lambda: control_plane.get("serviceaccounts", namespace=namespace),
            SECONDS,
        )
        control_plane.apply(registered)
        # The API server reads registrations by a watch.
        wait_for("the webhook to be called", kubectl_until_it_is_called, SECONDS)
        created = create(pod("labelled", **LABEL))
        assert inits(created) == [TOOLS]
        env = {variable["name"] for variable in created["spec"]["containers"][0]["env"]}
        assert {"PYTHONPATH", "HFREDUCE_ADDRESS", "FLYER_ZONE"} <= env
        assert inits(create(sums_by_daemon("with-daemon"))) == [TOOLS, "flyer-hfreduced"]
        assert not inits(create(pod("plain")))
        assert not inits(create(pod("refused", **{"fireflyer.dev/inject": "false"})))
        # Our own namespace is left out by the registration, and by the webhook itself.
        system = control_plane.kubectl(
            "create", "namespace", NAMESPACE, "--dry-run=client", "--output=json"
        )
        control_plane.apply(json.loads(system))
        control_plane.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}},
            namespace=NAMESPACE,
        )
        assert not inits(create(pod(webhook_name, **LABEL), NAMESPACE))
        control_plane.kubectl("delete", "pod", webhook_name, f"--namespace={NAMESPACE}", "--force")

    await asyncio.to_thread(story_while_it_serves)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert not inits(await asyncio.to_thread(create, pod("alone", **LABEL)))

    # One that takes every call and answers none costs its time-out, and no pod.
    async def silent(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"https://127.0.0.1:{port}{INJECTION_PATH}"
    registered["webhooks"][0]["clientConfig"]["url"] = url
    await asyncio.to_thread(control_plane.apply, registered)
    assert not inits(await asyncio.to_thread(create, pod("patient", **LABEL)))
    server.close()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
def test_an_injected_pod_finds_hfreduce(release: chart.Release, namespace: str) -> None:
    cluster = release.cluster

    def injected() -> bool:
        words = ("create", f"--namespace={namespace}", "-f", "-", "--output=json")
        text = cluster.kubectl(*words, "--dry-run=server", stdin=json.dumps(pod("probe", **LABEL)))
        return TOOLS in inits(json.loads(text))

    wait_for("the registration's certificate", injected, SECONDS)
    pods = (pod("trains", **LABEL), sums_by_daemon("sums"), pod("plain"))
    cluster.apply(*pods, namespace=namespace)

    def phase(name: str) -> str:
        return str(cluster.get("pod", name, namespace)["status"]["phase"])

    wait_for("its end", lambda: phase("trains") in ("Succeeded", "Failed"), SECONDS)
    output = cluster.kubectl("logs", "trains", f"--namespace={namespace}")
    assert "hfreduce is /flyer/" in output
    wait_for("its end", lambda: phase("sums") in ("Succeeded", "Failed"), SECONDS)
    output = cluster.kubectl("logs", "sums", f"--namespace={namespace}")
    assert "sum 3.0 by /run/flyer/hfreduced.sock" in output
    # Without the label there is none.
    wait_for("its end", lambda: phase("plain") in ("Succeeded", "Failed"), SECONDS)
    assert phase("plain") == "Failed"
