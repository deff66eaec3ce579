"""Real mounts of the shared cluster. They need root and /dev/fuse."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import threefs

sys.path.insert(0, str(Path(__file__).parent))

from holding import HeldMount, start_mount


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    able = os.geteuid() == 0 and Path("/dev/fuse").exists()
    suite = Path(__file__).parent
    for item in items:
        if not able and suite in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs root and /dev/fuse"))


@contextlib.contextmanager
def mounts(
    cluster: Any, client: threefs.Client, folder: Path
) -> Iterator[Callable[..., HeldMount]]:
    """The function of the fixture `mount`, with mount points in `folder`."""
    running: list[HeldMount] = []
    base = f"/fuse-{uuid.uuid4().hex[:8]}"
    client.make_directory(base, 0o755)
    # Programs of other users need access; pytest's folders are private.
    temporary = Path(tempfile.gettempdir())
    for path in (folder, *(parent for parent in folder.parents if temporary in parent.parents)):
        path.chmod(path.stat().st_mode | 0o011)

    def make(name: str = "root", **options: object) -> HeldMount:
        client.make_directory(f"{base}/{name}", 0o777, exist_ok=True)
        root = f"{base}/{name}"
        running.append(start_mount(cluster.file, root, folder, len(running), **options))
        return running[-1]

    yield make
    for mount in running:
        mount.close()
    client.rmtree(base)


@pytest.fixture
def mount(
    cluster: Any, client: threefs.Client, tmp_path: Path
) -> Iterator[Callable[..., HeldMount]]:
    """Mount a separate directory: `mount("name")`; the same name mounts the same directory."""
    with mounts(cluster, client, tmp_path) as make:
        yield make


@pytest.fixture
def patient(
    start_cluster: Callable[..., Any], tmp_path: Path
) -> Iterator[tuple[Any, Callable[..., HeldMount]]]:
    """A cluster that waits for a stopped service instead of replacing it, and its `mount`."""
    cluster = start_cluster("patient", "--node-failure-ms", "60000")
    # Otherwise the stopped service may be the only one of a chain, or not yet be in it.
    cluster.wait_whole()
    with cluster.client() as client, mounts(cluster, client, tmp_path) as make:
        yield cluster, make


@pytest.fixture(scope="module", params=[False, True], ids=["through", "behind"])
def tree_of_the_module(
    request: pytest.FixtureRequest, cluster: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A mounted directory for all tests of a module; each uses a separate folder."""
    folder = tmp_path_factory.mktemp("module")
    with cluster.client() as client, mounts(cluster, client, folder) as make:
        yield make(write_back=request.param).target


@pytest.fixture
def tree(mount: Callable[..., HeldMount]) -> Path:
    """A mounted, empty directory."""
    return mount().target
