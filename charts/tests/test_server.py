"""The rendered chart on a real API server: install, upgrade and uninstall.

Without nodes. Covers validation, defaulting and rejection by the server, and the result of Helm's
three-way merge.
"""

import base64
import json
import os
import re
import socket
import ssl
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from email.message import Message
from typing import Any

import pytest

from charts import helm
from charts.tests.conftest import CHART, IMAGES, Rendered
from testcluster.fixtures import started_cluster
from testcluster.handle import Cluster, KubectlError, wait_for
from testcluster.up import Options

pytestmark = pytest.mark.slow

RELEASE = "fire-flyer"
HELM_SECONDS = 300
OTHERS = {"PodMonitor", "ServiceMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, which the test's cluster lacks."""


class Installation:
    """A release in a separate namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def helm(self, *arguments: str) -> str:
        result = subprocess.run(
            [helm.find(), "--namespace", self.namespace, *arguments],
            env={**os.environ, "KUBECONFIG": self.cluster.kubeconfig},
            capture_output=True,
            text=True,
            timeout=HELM_SECONDS,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def upgrade(self, **values: Any) -> None:
        sets = [
            word
            for key, value in {**IMAGES, **values}.items()
            for word in ("--set-json", f"{key}={json.dumps(value)}")
        ]
        self.helm("upgrade", "--install", RELEASE, str(CHART), *sets)

    def get(self, kind: str, name: str) -> Any:
        return self.cluster.get(kind, name, namespace=self.namespace)

    def names(self, kinds: str, *arguments: str) -> set[str]:
        out = self.cluster.kubectl(
            "get", kinds, "--all-namespaces", "--output=name", "--ignore-not-found",
            "--selector=app.kubernetes.io/name=fire-flyer", *arguments,
        )  # fmt: skip
        return set(out.split())


@pytest.fixture(scope="module")
def control_plane() -> Iterator[Cluster]:
    """A separate cluster: Helm owns its objects, and other tests install the same CRDs."""
    yield from started_cluster(Options(light=True, controllers=True))


@pytest.fixture
def installation(control_plane: Cluster, namespace: str) -> Iterator[Installation]:
    installation = Installation(control_plane, namespace)
    installation.upgrade()
    yield installation
    installation.helm("uninstall", RELEASE, "--ignore-not-found")
    for kind in ("customresourcedefinitions", "secrets"):
        control_plane.kubectl(
            "delete", kind, "--namespace", namespace, "--wait=false",
            "--selector=app.kubernetes.io/name=fire-flyer",
        )  # fmt: skip


def test_the_server_accepts_every_object(
    everything: Rendered, control_plane: Cluster, namespace: str
) -> None:
    """Strict field validation: unknown fields are rejected, not dropped."""
    namespaced = [item for item in everything if item["kind"] not in OTHERS]
    for item in namespaced:
        if "namespace" in item["metadata"]:
            item["metadata"]["namespace"] = namespace
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": namespaced})
    output = control_plane.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text
    )
    assert output.count("created (server dry run)") == len(namespaced)


def test_pod_security_restricted_admits_the_controllers(
    control_plane: Cluster, namespace: str, everything: Rendered
) -> None:
    """All components except those of nodes, which need host paths."""
    control_plane.kubectl(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    wait_for(
        "the namespace's default account",
        lambda: control_plane.get("serviceaccounts", namespace=namespace),
    )
    for item in everything.of("Deployment", "StatefulSet", "DaemonSet"):
        pod: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": item["metadata"]["name"], "namespace": namespace},
            "spec": {
                # The chart's accounts and classes do not exist here and are not tested.
                **item["spec"]["template"]["spec"],
                "serviceAccountName": "default",
                "priorityClassName": "",
            },
        }
        if "volumeClaimTemplates" in item["spec"]:
            pod["spec"]["volumes"] = [*pod["spec"]["volumes"], {"name": "data", "emptyDir": {}}]
        command = ("create", "--dry-run=server", "-f", "-")
        if item["kind"] == "DaemonSet":
            with pytest.raises(KubectlError, match="violates PodSecurity"):
                control_plane.kubectl(*command, stdin=json.dumps(pod))
        else:
            assert "created" in control_plane.kubectl(*command, stdin=json.dumps(pod))


def test_an_upgrade_keeps_generated_keys_and_certificates(installation: Installation) -> None:
    key = installation.get("secret", "threefs-key")["data"]["key"]
    secret = base64.b64decode(key)
    assert len(secret) == 64, "as long as the services want it"
    assert int(secret, 16)
    # As set by the operator.
    bundle = base64.b64encode(b"authority").decode()
    installation.cluster.kubectl(
        "patch", "secret", "flyer-certificates", "--namespace", installation.namespace,
        "--patch", json.dumps({"data": {"tls.crt": bundle}}),
    )  # fmt: skip
    installation.cluster.kubectl(
        "patch", "mutatingwebhookconfiguration", "flyer-injection", "--type=json", "--patch",
        json.dumps([{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]),
    )  # fmt: skip

    installation.upgrade(**{"operator.replicas": 3, "injection.timeoutSeconds": 3})

    assert installation.get("deployment", "flyer-operator")["spec"]["replicas"] == 3
    assert installation.get("secret", "threefs-key")["data"]["key"] == key
    assert installation.get("secret", "flyer-certificates")["data"] == {"tls.crt": bundle}
    [webhook] = installation.get("mutatingwebhookconfiguration", "flyer-injection")["webhooks"]
    assert webhook["timeoutSeconds"] == 3
    assert webhook["clientConfig"]["caBundle"] == bundle


def test_a_rollback_keeps_secrets_and_definitions(installation: Installation) -> None:
    """Values set by the operator are kept, and every kind is served during the upgrade."""
    cluster = installation.cluster
    bundle = base64.b64encode(b"made by the operator").decode()
    cluster.kubectl(
        "patch", "secret", "flyer-certificates", "--namespace", installation.namespace,
        "--type=merge", "--patch", json.dumps({"data": {"tls.crt": bundle}}),
    )  # fmt: skip
    key = installation.get("secret", "threefs-key")["data"]["key"]
    definitions = {
        definition["metadata"]["name"]: definition["metadata"]["uid"]
        for definition in cluster.get("customresourcedefinitions")
        if definition["spec"]["group"] == "fireflyer.dev"
    }
    assert len(definitions) == 5
    installation.upgrade(**{"operator.replicas": 3})

    installation.helm("rollback", RELEASE, "1")

    assert installation.get("deployment", "flyer-operator")["spec"]["replicas"] != 3
    assert installation.get("secret", "threefs-key")["data"]["key"] == key
    assert installation.get("secret", "flyer-certificates")["data"] == {"tls.crt": bundle}
    for name, uid in definitions.items():
        stored = cluster.get("customresourcedefinition", name)
        assert stored["metadata"]["uid"] == uid, "replaced: its objects would be gone"
        conditions = {
            condition["type"]: condition["status"] for condition in stored["status"]["conditions"]
        }
        assert conditions["Established"] == "True"
        assert cluster.get(name) == []


def test_jobs_and_data_survive_uninstallation_and_are_adopted_when_reinstalled(
    installation: Installation,
) -> None:
    kinds = installation.cluster.kubectl(
        "api-resources", "--verbs=list,delete", "--output=name"
    ).split()
    everywhere = ",".join(kind for kind in kinds if not kind.endswith("fireflyer.dev"))
    key = installation.get("secret", "threefs-key")["data"]["key"]
    pods = ("mgmtd-0", "meta-0", "storage-0", "storage-1", "storage-2")
    claims = {f"persistentvolumeclaim/data-threefs-{pod}" for pod in pods}

    def remaining_objects() -> set[str]:
        return {name for name in installation.names(everywhere) if "endpoint" not in name}

    # Controllers create the claims after Helm has finished, and delete dependents of its objects.
    wait_for("a claim for each server", lambda: claims <= remaining_objects())
    assert len(remaining_objects()) > 50

    installation.helm("uninstall", RELEASE, "--wait")

    wait_for(
        "only the data and its key remain",
        lambda: (
            {
                name
                for name in remaining_objects()
                if not name.startswith("customresourcedefinition")
            }
            == {"secret/threefs-key", *claims}
        ),
    )
    assert any(name.startswith("customresourcedefinition") for name in remaining_objects())
    installation.upgrade()
    assert installation.get("secret", "threefs-key")["data"]["key"] == key


@pytest.mark.parametrize(
    ("user", "path", "schema"),
    [
        ("flyer-operator", "/apis/fireflyer.dev/v1alpha1/flyerjobs", "flyer-control"),
        ("flyer-operator", "/api/v1/pods", "flyer-control"),
        (
            "flyer-operator",
            "/apis/coordination.k8s.io/v1/namespaces/{}/leases/flyer-operator",
            "flyer-leases",
        ),
        ("threefs-csi-controller", "/api/v1/persistentvolumes", "flyer-control"),
        # A compromised node has the account of all node agents.
        ("flyer-node", "/apis/fireflyer.dev/v1alpha1/nodehealths", "flyer-nodes"),
        ("flyer-node", "/apis/fireflyer.dev/v1alpha1/namespaces/{}/flyerjobs", "flyer-job-reads"),
        ("default", "/apis/fireflyer.dev/v1alpha1/namespaces/{}/flyerjobs", "flyer-job-reads"),
        ("default", "/api/v1/pods", "service-accounts"),
        (
            "default",
            "/apis/coordination.k8s.io/v1/namespaces/{}/leases/flyer-operator",
            "service-accounts",
        ),
    ],
)
def test_users_do_not_share_the_servers_seats_with_the_controllers(
    installation: Installation, user: str, path: str, schema: str
) -> None:
    """Rejected requests count too: the schema depends on user and resource only."""
    cluster, namespace = installation.cluster, installation.namespace
    schemas = {
        item["metadata"]["uid"]: item["metadata"]["name"] for item in cluster.get("flowschema")
    }
    token = cluster.kubectl("create", "token", user, f"--namespace={namespace}").strip()

    def flow_schema() -> str | None:
        headers = ask(cluster, token, path.format(namespace))
        return schemas.get(headers["X-Kubernetes-PF-FlowSchema-UID"])

    # The server applies new schemas shortly after it has accepted them.
    wait_for(f"{user} has the schema {schema}", lambda: flow_schema() == schema)


def ask(cluster: Cluster, token: str, path: str, method: str = "GET", body: bytes = b"") -> Message:
    """Headers of the response, also of an error."""
    request = urllib.request.Request(
        cluster.state.server + path,
        method=method,
        data=body or None,
        headers={
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/merge-patch+json",
        },
    )
    context = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            headers: Message = answer.headers
    except urllib.error.HTTPError as refused:
        headers = refused.headers
    return headers


def slow_body(cluster: Cluster, token: str, path: str) -> socket.socket:
    """A request with a stalled body: it occupies a seat until the server ends it."""
    url = urllib.parse.urlsplit(cluster.state.server)
    plain = socket.create_connection((url.hostname, url.port), timeout=10)
    opened = ssl._create_unverified_context().wrap_socket(plain)
    opened.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n".encode()
    )
    return opened


def test_incomplete_request_bodies_delay_neither_reads_nor_nodes(
    installation: Installation,
) -> None:
    """Stalled bodies occupy every seat for writes, and no other seats."""
    cluster, namespace = installation.cluster, installation.namespace
    jobs = f"/apis/fireflyer.dev/v1alpha1/namespaces/{namespace}/flyerjobs"
    cluster.kubectl(
        "create", "rolebinding", "edits", "--clusterrole=edit",
        f"--serviceaccount={namespace}:default", f"--namespace={namespace}",
    )  # fmt: skip
    user = cluster.kubectl("create", "token", "default", f"--namespace={namespace}").strip()
    node = cluster.kubectl("create", "token", "flyer-node", f"--namespace={namespace}").strip()

    def seats(metric: str) -> int:
        text = cluster.kubectl("get", "--raw", "/metrics")
        line = (
            rf'^apiserver_flowcontrol_{metric}\{{[^}}]*priority_level="flyer-jobs"[^}}]*\}} (\d+)'
        )
        match = re.search(line, text, re.MULTILINE)
        return int(match[1]) if match else 0

    wait_for("the level exists", lambda: seats("nominal_limit_seats") > 0)
    all_seats = seats("nominal_limit_seats")
    with ExitStack() as opened:
        for _ in range(all_seats + 2):
            opened.enter_context(slow_body(cluster, user, jobs))
        wait_for(
            "all seats are taken",
            lambda: seats("current_executing_requests") >= all_seats,
        )
        ask(cluster, user, jobs)
        ask(cluster, node, "/apis/fireflyer.dev/v1alpha1/nodehealths/x", "PATCH", b"{}")
        assert seats("current_executing_requests") >= all_seats


def test_an_upgrade_without_changes_restarts_no_pod(installation: Installation) -> None:
    """An upgrade without changes restarts no pod."""
    kinds = ("deployment", "daemonset", "statefulset")

    def generations() -> dict[str, int]:
        return {
            f"{kind}/{item['metadata']['name']}": item["metadata"]["generation"]
            for kind in kinds
            for item in installation.cluster.get(kind, namespace=installation.namespace)
        }

    before = generations()
    assert len(before) == 9
    installation.upgrade()
    assert generations() == before
