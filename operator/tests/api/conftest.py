"""API servers with the CRDs: a real one, skipped where none was built, and the one in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from flyer.kube.apiserver import Access, Api, find_access

from fakekube import ApiServer

from .real_api import CRDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from testcluster.handle import Cluster


@pytest.fixture(scope="session")
def kinds(control_plane: Cluster) -> Cluster:
    """The API server with our kinds."""
    control_plane.kubectl("apply", "--server-side", "-f", str(CRDS))
    control_plane.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all", deadline_s=70
    )
    return control_plane


@pytest.fixture
async def api(kinds: Cluster) -> AsyncIterator[Api]:
    access = await find_access(kinds.kubeconfig)
    async with Api(access, agent="tests") as client:
        yield client


@pytest.fixture
async def memory_api() -> AsyncIterator[Api]:
    """The API server in memory, with the CRDs alone, as `kinds` has them."""
    async with ApiServer() as server:
        server.admission.off.add("*")
        async with Api(Access(server.url), agent="tests") as client:
            yield client
