"""The chart, installed once for all stories of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from e2e import chart

if TYPE_CHECKING:
    from e2e.cluster.handle import Cluster


@pytest.fixture(scope="session")
def operator_release(cluster: Cluster) -> chart.Release:
    """Our operator, running; nothing else of the suite."""
    cluster.load_images("train", "controller", "collectives")
    release = chart.Release(cluster, dict(chart.OPERATOR_ALONE))
    release.install()
    return release


@pytest.fixture(scope="module")
def storage_release(cluster: Cluster) -> chart.Release:
    """The whole suite, running: operator, 3FS, CSI driver. It stays; installing again is cheap."""
    cluster.load_images(*chart.IMAGES, "train")
    release = chart.Release(cluster)
    release.install()
    return release
