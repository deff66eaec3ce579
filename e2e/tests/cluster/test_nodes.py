"""The whole cluster: preconditions of every scenario."""

from __future__ import annotations

import pytest

from e2e.lib.pods import sleeper, train_pod
from testcluster.handle import Cluster, wait_for

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).read().decode())"


@pytest.fixture(scope="module", autouse=True)
def _images(cluster: Cluster) -> None:
    cluster.load_images("train")


def test_nodes_are_in_two_zones(cluster: Cluster) -> None:
    nodes = cluster.get("nodes", selector="fireflyer.dev/dedicated=true")
    zones = [node["metadata"]["labels"]["fireflyer.dev/zone"] for node in nodes]
    assert sorted(zones) == ["A", "A", "B", "B"]
    assert all(
        taint["key"] == "fireflyer.dev/dedicated"
        for node in nodes
        for taint in node["spec"]["taints"]
    )


def test_pods_reach_each_other_services_and_the_api_server(
    cluster: Cluster, namespace: str
) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    web = train_pod("web", "node-a1", "python3", "-m", "http.server", "8000", "-d", "/etc")
    cluster.apply(service, web, sleeper("client", "node-b1"), namespace=namespace)
    cluster.wait_ready("web", "client", namespace=namespace)

    def fetch(url: str) -> str:
        return cluster.kubectl(
            *(f"--namespace={namespace}", "exec", "client", "--", "python3", "-c", FETCH, url)
        )

    address = cluster.get("pod", "web", namespace)["status"]["podIP"]
    assert "nonroot" in fetch(f"http://{address}:8000/passwd")
    assert "nonroot" in wait_for("the Service", lambda: fetch("http://web/passwd"))
    assert "nonroot" in fetch(f"http://web.{namespace}.svc.cluster.local/passwd")
    secure = "import ssl; ssl._create_default_https_context = ssl._create_unverified_context\n"
    version = cluster.kubectl(
        *(f"--namespace={namespace}", "exec", "client", "--", "python3", "-c", secure + FETCH),
        "https://kubernetes.default.svc/version",
    )
    assert "v1.36.3" in version
    assert "GET /passwd" in cluster.kubectl("logs", "web", f"--namespace={namespace}")


def test_the_scheduler_places_a_pod_on_the_shared_node(cluster: Cluster, namespace: str) -> None:
    pod = sleeper("shared", "", tolerations=[])
    del pod["spec"]["nodeName"]
    cluster.apply(pod, namespace=namespace)
    cluster.wait_ready("shared", namespace=namespace)
    assert cluster.get("pod", "shared", namespace)["spec"]["nodeName"] == "node-s1"


def test_a_mount_made_in_one_pod_appears_in_another(cluster: Cluster, namespace: str) -> None:
    """Mounts propagate from a pod to the node and to other pods, as CSI drivers require."""
    volume = {
        "name": "v",
        "hostPath": {"path": f"/var/lib/{namespace}", "type": "DirectoryOrCreate"},
    }
    pods = []
    for name, direction in (("mounter", "Bidirectional"), ("reader", "HostToContainer")):
        pod = sleeper(name, "node-a2", volumes=[volume])
        container = pod["spec"]["containers"][0]
        container["securityContext"] = {"privileged": True, "runAsUser": 0}
        container["volumeMounts"] = [
            {"name": "v", "mountPath": "/shared", "mountPropagation": direction}
        ]
        pods.append(pod)
    cluster.apply(*pods, namespace=namespace)
    cluster.wait_ready("mounter", "reader", namespace=namespace)

    def shell(pod: str, text: str) -> str:
        return cluster.kubectl(f"--namespace={namespace}", "exec", pod, "--", "sh", "-c", text)

    shell("mounter", "mkdir /shared/m && mount -t tmpfs t /shared/m && echo here > /shared/m/f")
    assert shell("reader", "cat /shared/m/f") == "here\n"
    shell("mounter", "umount /shared/m")


def test_a_killed_kubelet_is_restarted_and_its_pods_continue(
    cluster: Cluster, namespace: str
) -> None:
    cluster.apply(sleeper("survivor", "node-b2"), namespace=namespace)
    cluster.wait_ready("survivor", namespace=namespace)
    before = cluster.get("pod", "survivor", namespace)["status"]["containerStatuses"]
    kubelet = cluster.process("node-b2-kubelet")
    kubelet.kill()
    assert kubelet.pids() == []
    kubelet.start()
    cluster.apply(sleeper("later", "node-b2"), namespace=namespace)
    cluster.wait_ready("survivor", "later", namespace=namespace)
    after = cluster.get("pod", "survivor", namespace)["status"]["containerStatuses"]
    assert after[0]["containerID"] == before[0]["containerID"]
    assert after[0]["restartCount"] == 0
