"""Fixtures: the cluster's hardware and the chart, installed once for all scenarios."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from e2e.lib import chart
from e2e.lib.gateway import Control, controlled
from e2e.lib.hardware import FakeHardware, fake_hardware
from e2e.lib.operators import Stage, staged
from testcluster.handle import wait_for
from testcluster.measurements import record, table

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from testcluster.handle import Cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures of the run."""
    if lines := table():
        terminalreporter.section("figures and goals")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def machines(cluster: Cluster) -> dict[str, FakeHardware]:
    """GPUs and a network card for every node, in order."""
    return {node: fake_hardware(cluster, node) for node in cluster.state.nodes}


@pytest.fixture
def node_processes(cluster: Cluster) -> None:
    """Skips tests that stop a process of a node: nodes of kind have other processes."""
    if cluster.state.kind:
        pytest.skip("kind runs the nodes' programs: set FLYER_E2E_ENGINE=processes")


@pytest.fixture(scope="session")
def release(cluster: Cluster, machines: dict[str, FakeHardware]) -> chart.Release:
    """The whole suite, running: operator, device plugin, 3FS, CSI driver."""
    contents = cluster.load_images(*chart.IMAGES, "train")
    # All images have one tag: by a label, pods of a cluster that was there already are replaced.
    release = chart.Release(cluster, {"commonLabels": {"images": contents}})
    record("chart", "install_seconds", release.install(), most=60)
    return release


@pytest.fixture(scope="module")
def no_operator(cluster: Cluster) -> Iterator[None]:
    """Stops an installed operator, so that only the test manages jobs and their pods."""
    space = f"--namespace={chart.NAMESPACE}"
    replicas = cluster.kubectl("get", "deployment", "flyer-operator", space, "--ignore-not-found",
                            "--output=jsonpath={.spec.replicas}")  # fmt: skip
    if not replicas:
        yield
        return
    scale = ("scale", "deployment", "flyer-operator", space)
    operators = "app.kubernetes.io/component=operator"
    try:
        cluster.kubectl(*scale, "--replicas=0")
        wait_for(
            "the operator's end",
            lambda: not cluster.get("pods", namespace=chart.NAMESPACE, selector=operators),
            120,
        )
        yield
    finally:
        cluster.kubectl(*scale, f"--replicas={replicas}")
    cluster.kubectl(
        "rollout", "status", "deployment/flyer-operator", space, "--timeout=120s", deadline_s=130
    )


@pytest.fixture
def operator_kubeconfig(cluster: Cluster, no_operator: None, tmp_path: Path) -> str:
    """Access as the operator, which alone may make pods of jobs where a release is installed."""
    space = f"--namespace={chart.NAMESPACE}"
    account = ("flyer-operator", space)
    if not cluster.kubectl("get", "serviceaccount", *account, "--ignore-not-found"):
        return cluster.kubeconfig
    token = cluster.kubectl("create", "token", *account).strip()
    copy = tmp_path / "kubeconfig"
    shutil.copy(cluster.kubeconfig, copy)
    config = ("config", f"--kubeconfig={copy}")
    cluster.kubectl(*config, "set-credentials", "operator", f"--token={token}")
    cluster.kubectl(*config, "set-context", "--current", "--user=operator")
    return str(copy)


@pytest.fixture
async def control(
    cluster: Cluster, namespace: str, operator_kubeconfig: str
) -> AsyncIterator[Control]:
    """The operator's gateway with the test as its scheduler."""
    cluster.load_images("train", "controller", "collectives")
    async with controlled(cluster, namespace, operator_kubeconfig) as control:
        yield control


@pytest.fixture
async def stage(control_plane: Cluster, namespace: str) -> AsyncIterator[Stage]:
    """Operators of this process on a real API server, behind a proxy."""
    async with staged(control_plane, namespace) as stage:
        yield stage
