"""pytest fixtures: a control plane or a whole cluster, and a namespace for each test.

Registered by the repository's conftest.py, so that all tests can use them. They do not build
Kubernetes (minutes, the first time): `make cluster-tools` does, before the tests. Without it,
the tests that use these fixtures are skipped, or fail if FLYER_E2E_REQUIRED is set, as `make e2e`
does: it selects them by the mark `real_server`, which is added here.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testcluster.handle import Cluster
    from testcluster.up import Options


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of the control plane.

    One worker runs all of them, so that only one control plane is started.
    """
    for item in items:
        if "control_plane" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real_server)
            item.add_marker(pytest.mark.xdist_group("control-plane"))


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """etcd, the API server and the controller manager, without nodes, for the whole session."""
    from testcluster.up import Options

    yield from started_cluster(Options(light=True, controllers=True))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A whole cluster for the session: nodes in two zones, networks, DNS.

    With FLYER_E2E_CLUSTER=FOLDER it is the cluster that runs in that folder, which then stays.
    """
    from testcluster.handle import Cluster
    from testcluster.state import State
    from testcluster.up import Options

    if running := os.environ.get("FLYER_E2E_CLUSTER"):
        yield Cluster(State.load(Path(running)))
    elif os.geteuid() != 0:
        unavailable("a cluster with nodes needs root (namespaces, mounts)")
    else:
        yield from started_cluster(Options())


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace for this test in the cluster that it requested; deleted afterwards."""
    name = "cluster" if "cluster" in request.fixturenames else "control_plane"
    cluster: Cluster = request.getfixturevalue(name)
    namespace_name = f"test-{os.urandom(4).hex()}"
    cluster.kubectl("create", "namespace", namespace_name)
    if name == "cluster":
        # Right after an API server's restart the controllers need a while to make it: a job that
        # created earlier would start a second attempt, which a scenario may count.
        account = ("--for=create", "serviceaccount/default", "--timeout=60s")
        cluster.kubectl("wait", f"--namespace={namespace_name}", *account, deadline_s=70)
    yield namespace_name
    cluster.kubectl("delete", "namespace", namespace_name, "--wait=false")


def started_cluster(options: Options) -> Iterator[Cluster]:
    """Starts a cluster in a temporary folder, removes it afterwards and checks for leftovers."""
    from programs import binaries
    from testcluster import network
    from testcluster.guard import guarded
    from testcluster.handle import Cluster
    from testcluster.measurements import record
    from testcluster.processes import pids_of_cluster
    from testcluster.state import State
    from testcluster.up import programs, up

    try:
        for name in programs(options):
            binaries.find(name)
    except binaries.BinaryError as error:
        unavailable(str(error))
    state = Path(tempfile.mkdtemp(prefix="flyer-e2e-")) / "cluster"
    with guarded(state):
        started_at = time.monotonic()
        started = up(state, options)
        if not options.light:
            record("cluster", "ready_seconds", time.monotonic() - started_at, most=60)
        yield Cluster(started)
    # Regardless of what ran on it: pods, mounts of 3FS, nodes that lost power.
    assert not pids_of_cluster(State(state))
    assert not network.traces(started)
    assert str(state) not in Path("/proc/self/mountinfo").read_text()
    assert not state.parent.exists()


def unavailable(why: str) -> NoReturn:
    """Skips the test, or fails it where tests are required to run."""
    if os.environ.get("FLYER_E2E_REQUIRED"):
        pytest.fail(why)
    pytest.skip(why)
