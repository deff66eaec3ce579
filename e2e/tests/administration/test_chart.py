"""The chart on real kubelets: install, upgrade under a running job, uninstall.

`build/e2e/chart.json` has the duration of each.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib import chart
from e2e.lib.pods import TRAIN_IMAGE
from e2e.lib.volumes import ENDS, WRITES, claim, pod_with, sh
from images.build import archive
from images.contents import IMAGES
from testcluster.handle import wait_for
from testcluster.measurements import record

if TYPE_CHECKING:
    from testcluster.handle import Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    # Images are built the first time.
    pytest.mark.timeout(1800),
]

JOB_SECONDS = 480.0
STEPS = 1500
SCRIPT = f"""
import os, time, flyer.job
job = flyer.job.current()
for step in range({STEPS}):
    time.sleep(0.1)
    if os.environ["RANK"] == "0":
        job.progress(step + 1, total_steps={STEPS})
print("done", flush=True)
"""


def pods(cluster: Cluster, selector: str, namespace: str = chart.NAMESPACE) -> list[Any]:
    pod_list = json.loads(
        cluster.kubectl(
            "get", "pods", f"--namespace={namespace}", f"--selector={selector}", "--output=json"
        )
    )
    items: list[Any] = pod_list["items"]
    return items


def test_every_component_is_ready(release: chart.Release) -> None:
    release_pods = pods(release.cluster, "app.kubernetes.io/name=fire-flyer")
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in release_pods}
    assert components >= {"operator", "node-agent", "threefs-mgmtd", "threefs-storage", "csi-node"}
    names = [pod["metadata"]["name"] for pod in release_pods]
    # Helm waits until all pods but one of a DaemonSet are ready.
    release.cluster.wait_ready(*names, namespace=chart.NAMESPACE)
    for pod in pods(release.cluster, "app.kubernetes.io/name=fire-flyer"):
        restarts = sum(each["restartCount"] for each in pod["status"]["containerStatuses"])
        assert restarts == 0, pod["metadata"]["name"]


def test_the_controllers_image_is_small() -> None:
    """As an archive, which is what a registry keeps and a node pulls."""
    (controller,) = [image for image in IMAGES if image.name == "controller"]
    size_bytes = archive(controller).stat().st_size
    record("images", "controller_megabytes", size_bytes / 1e6, most=150)


def test_components_have_all_rights_that_they_use(release: chart.Release) -> None:
    """Components have all rights they use: no log contains a refused request."""
    for pod in pods(release.cluster, "app.kubernetes.io/name=fire-flyer"):
        log = release.cluster.kubectl(
            "logs", f"--namespace={chart.NAMESPACE}", pod["metadata"]["name"], "--all-containers"
        )
        refused = [line for line in log.splitlines() if "forbidden" in line.lower()]
        # A namespace that is being deleted refuses every creation, regardless of rights.
        refused = [line for line in refused if "because it is being terminated" not in line]
        assert not refused, pod["metadata"]["name"]


def test_only_the_leader_serves_the_gateway_and_every_replica_serves_the_webhook(
    release: chart.Release,
) -> None:
    def addresses(service: str) -> set[str]:
        slices = json.loads(
            release.cluster.kubectl(
                "get", "endpointslices", f"--namespace={chart.NAMESPACE}", "--output=json",
                f"--selector=kubernetes.io/service-name={service}",
            )
        )  # fmt: skip
        return {
            address
            for endpoint_slice in slices["items"]
            for endpoint in endpoint_slice["endpoints"] or []
            if endpoint["conditions"]["ready"]
            for address in endpoint["addresses"]
        }

    wait_for("one leader", lambda: len(addresses("flyer-gateway")) == 1)
    assert len(addresses("flyer-webhook")) == 2


def job_manifest(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "fireflyer.dev/v1alpha1",
        "kind": "FlyerJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": 2,
            "ranksPerNode": 1,
            "crossZone": "Never",
            "template": {
                "spec": {
                    "containers": [
                        {
                            "name": "trainer",
                            "image": TRAIN_IMAGE,
                            "imagePullPolicy": "Never",
                            "command": ["python3", "-c", SCRIPT],
                        }
                    ]
                }
            },
        },
    }


def test_an_upgrade_does_not_affect_a_running_job(release: chart.Release, namespace: str) -> None:
    cluster = release.cluster
    cluster.apply(
        job_manifest("steady"),
        claim("book", "64Mi"),
        pod_with("writer", "node-a1", "book"),
        namespace=namespace,
    )

    def status() -> dict[str, Any]:
        steady_job: dict[str, Any] = cluster.get("flyerjob", "steady", namespace=namespace)
        return dict(steady_job.get("status") or {})

    def step() -> int:
        return int((status().get("progress") or {}).get("step") or 0)

    def lines() -> list[str]:
        return sh(cluster, namespace, "writer", "cat /volume/lines").split()

    wait_for("the job's first steps", step, JOB_SECONDS)
    cluster.wait_ready("writer", namespace=namespace, deadline_s=JOB_SECONDS)
    sh(cluster, namespace, "writer", WRITES)
    wait_for("the first lines", lines, JOB_SECONDS)
    selector = "fireflyer.dev/job=steady"
    before = {pod["metadata"]["uid"] for pod in pods(cluster, selector, namespace)}
    operators = {
        pod["metadata"]["uid"] for pod in pods(cluster, "app.kubernetes.io/component=operator")
    }

    # All pods of the release are replaced: the label is in every template.
    release.values = {"commonLabels": {"upgraded": namespace}}
    record("chart", "upgrade_seconds", release.install())

    after = pods(cluster, "app.kubernetes.io/component=operator")
    assert not operators & {pod["metadata"]["uid"] for pod in after}
    step_before = step()
    wait_for(
        "progress after the upgrade",
        lambda: step() > step_before or status()["phase"] == "Succeeded",
    )
    wait_for("the job's end", lambda: status().get("phase") == "Succeeded", JOB_SECONDS)
    assert {pod["metadata"]["uid"] for pod in pods(cluster, selector, namespace)} == before
    assert status()["history"]["attempt"] == 1
    assert status()["history"].get("restarts", 0) == 0
    assert step() > step_before  # the last output of a rank may arrive after the end of its pod
    # Meta, storage and the CSI driver were replaced while the pod kept writing.
    count_before = len(lines())
    wait_for("more lines", lambda: len(lines()) > count_before, JOB_SECONDS)
    sh(cluster, namespace, "writer", ENDS)
    written_lines = lines()
    assert written_lines == [str(number) for number in range(len(written_lines))]
    writer = cluster.get("pod", "writer", namespace)
    assert writer["status"]["containerStatuses"][0]["restartCount"] == 0


def test_definitions_the_key_and_jobs_survive_uninstallation(release: chart.Release) -> None:
    cluster = release.cluster
    release.uninstall()
    wait_for(
        "no pods of the release", lambda: not pods(cluster, "app.kubernetes.io/name=fire-flyer")
    )
    names = cluster.kubectl(
        "get", "--output=name", "--ignore-not-found", f"--namespace={chart.NAMESPACE}",
        "--selector=app.kubernetes.io/name=fire-flyer",
        "deployments,daemonsets,statefulsets,services,serviceaccounts,roles,rolebindings,"
        "clusterroles,clusterrolebindings,networkpolicies,poddisruptionbudgets,storageclasses,"
        "csidrivers,priorityclasses,mutatingwebhookconfigurations,validatingadmissionpolicies,"
        "validatingadmissionpolicybindings,secrets,configmaps",
    ).split()  # fmt: skip
    assert names == ["secret/threefs-key"]
    assert "flyerjobs.fireflyer.dev" in cluster.kubectl("get", "crds", "--output=name")

    # A reinstallation finds the previous data.
    record("chart", "install_again_seconds", release.install())
    test_every_component_is_ready(release)
