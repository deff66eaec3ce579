"""Data that is lost on the only replica: an error that names it, never zeros."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import threefs

sys.path.insert(0, str(Path(__file__).parent))

from test_service_processes import Pods, choose_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, choose_ports(6), replicas=1)
    yield pods
    for process in pods.processes.values():
        process.kill()
        process.wait()


def test_a_chunk_that_is_lost_is_an_error_that_names_it(pods: Pods) -> None:
    """One replica each, and the disk of one node is set back to an earlier state of it."""
    pods.start_all()
    storage, earlier = pods.folder / "storage-0", pods.folder / "earlier"
    with threefs.connect(pods.folder / "cluster.json", timeout_seconds=60) as client:
        client.write_file("/first", random.Random(2).randbytes(MIB) * 48)  # all services are up
        pods.stop("storage-0")
        shutil.copytree(storage, earlier)
        pods.start("storage-0")
        data = random.Random(3).randbytes(MIB) * 48
        client.write_file("/dense", data)
        client.batch_write([("/sparse", 40 * MIB, b"end")])
        pods.stop("storage-0")
        shutil.rmtree(storage)
        shutil.copytree(earlier, storage)
        pods.start("storage-0")
        with pytest.raises(threefs.Corrupt, match=r"/dense.*was written and .* does not have it"):
            client.read_file("/dense")
        # A hole is no loss, whichever chain it would be on.
        assert client.batch_read([("/sparse", 0, 30 * MIB)]) == [bytes(30 * MIB)]
