"""The cluster's hardware and the chart on it, installed once for all stories of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from e2e import chart
from e2e.figures import figure
from e2e.hardware import FakeHardware, fake_hardware

if TYPE_CHECKING:
    from e2e.cluster.handle import Cluster


@pytest.fixture(scope="session")
def machines(cluster: Cluster) -> dict[str, FakeHardware]:
    """GPUs and a network card for every node, in order."""
    return {node: fake_hardware(cluster, node) for node in cluster.state.nodes}


@pytest.fixture(scope="session")
def release(cluster: Cluster, machines: dict[str, FakeHardware]) -> chart.Release:
    """The whole suite, running: operator, device plugin, 3FS, CSI driver."""
    contents = cluster.load_images(*chart.IMAGES, "train")
    # All images have one tag: by a label, pods of a cluster that was there already are replaced.
    release = chart.Release(cluster, {"commonLabels": {"images": contents}})
    figure("chart", "install_seconds", release.install())
    return release
