"""One short run of `make chaos`: real processes, a fault, and every check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from bench.chaos import run as chaos_run
from bench.chaos.__main__ import etcd_options
from bench.chaos.cluster import ChaosCluster
from bench.chaos.run import Load, run
from programs import binaries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOAD = Load(clients=2, name_workers=2, data_workers=1, cells=4, files=1, seconds=3.0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ChaosCluster]:
    try:
        options = etcd_options()
    except binaries.BinaryError as error:
        pytest.skip(str(error))
    cluster = ChaosCluster(tmp_path / "cluster", options, node_failure_ms=2000)
    yield cluster
    cluster.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_passes_every_check_and_a_lost_file_is_found(
    cluster: ChaosCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(cluster, [], 3, LOAD, ["kill-meta"], tmp_path / "run")
    assert result.failures == []
    assert result.faults in (["kill meta"], ["kill meta-2"])
    assert result.operations > result.acknowledged > 0
    assert result.objects > LOAD.cells
    assert set(result.gaps) == {"change", "lookup", "write", "read"}
    assert not (tmp_path / "run").exists()

    read = chaos_run._Tree.read_private

    def without_one_file(tree: Any, client: Any) -> dict[str, dict[str, int]]:
        folders = read(tree, client)
        next(files for files in folders.values() if files).popitem()
        return folders

    monkeypatch.setattr(chaos_run._Tree, "read_private", without_one_file)
    result = run(cluster, [], 4, LOAD, ["kill-storage"], tmp_path / "run")
    assert len(result.failures) == 1
    assert result.failures[0].startswith("acknowledged and lost: `")
    # What is needed to see why is kept.
    assert list((tmp_path / "run" / "history").iterdir())
    assert (tmp_path / "run" / "logs" / "meta.log").exists()
