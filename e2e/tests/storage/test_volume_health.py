"""Volume statistics and condition reported by the kubelet."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from e2e.lib import chart, volumes
from e2e.lib.volumes import claim, pod_with, wait_event
from testcluster.handle import wait_for

if TYPE_CHECKING:
    from testcluster.handle import Cluster

# The first test of a session starts the cluster, loads images and installs the chart.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

MEBIBYTE = 1 << 20
SECONDS = 180.0
NODE = "node-a2"


def summary(cluster: Cluster, namespace: str, pod: str) -> dict[str, Any] | None:
    """The pod's one claim in the kubelet's `/stats/summary`."""
    reported = json.loads(
        cluster.kubectl("get", "--raw", f"/api/v1/nodes/{NODE}/proxy/stats/summary")
    )
    for item in reported["pods"]:
        if item["podRef"]["name"] == pod and item["podRef"]["namespace"] == namespace:
            for volume in item.get("volume", ()):
                if "pvcRef" in volume:
                    return dict(volume)
    return None


def metric(cluster: Cluster, namespace: str, name: str) -> float | None:
    """One of the kubelet's series of the namespace's one claim."""
    text = cluster.kubectl("get", "--raw", f"/api/v1/nodes/{NODE}/proxy/metrics")
    match = re.search(rf'^{name}{{[^}}]*namespace="{namespace}"[^}}]*}} (\S+)', text, re.MULTILINE)
    return float(match[1]) if match else None


def test_the_kubelet_reports_use_and_condition_of_a_claim(
    release: chart.Release, namespace: str
) -> None:
    cluster = release.cluster
    cluster.apply(claim("data", "64Mi"), pod_with("pod", NODE, "data"), namespace=namespace)
    cluster.wait_ready("pod", namespace=namespace, deadline_s=SECONDS)
    fill = "dd if=/dev/zero of=/volume/large bs=1M count=8 conv=fsync status=none"
    volumes.sh(cluster, namespace, "pod", fill)

    def usage() -> dict[str, Any] | None:
        reported = summary(cluster, namespace, "pod")
        return reported if reported and reported["usedBytes"] == 8 * MEBIBYTE else None

    reported = wait_for("the kubelet to report the usage", usage, SECONDS)
    assert reported["pvcRef"] == {"name": "data", "namespace": namespace}
    assert (reported["capacityBytes"], reported["availableBytes"]) == (64 * MEBIBYTE, 56 * MEBIBYTE)
    assert reported["inodesUsed"] >= 1
    assert reported["volumeHealthStats"] == {"abnormal": False}
    assert metric(cluster, namespace, "kubelet_volume_stats_used_bytes") == 8 * MEBIBYTE
    assert metric(cluster, namespace, "kubelet_volume_stats_capacity_bytes") == 64 * MEBIBYTE

    # Its daemon is stopped: the kubelet detects it without accessing the mount and notifies the
    # pod.
    health = "kubelet_volume_stats_health_status_abnormal"
    volumes.signal_daemon(release, namespace, "data", NODE, "STOP")
    try:
        wait_for("the metric", lambda: metric(cluster, namespace, health) == 1, SECONDS)
        wait_event(cluster, namespace, "pod/pod", "is stopped by a signal; continue it")
    finally:
        volumes.signal_daemon(release, namespace, "data", NODE, "CONT")
    wait_for("the metric", lambda: metric(cluster, namespace, health) == 0, SECONDS)
    assert volumes.sh(cluster, namespace, "pod", "stat -c %s /volume/large") == f"{8 * MEBIBYTE}\n"
