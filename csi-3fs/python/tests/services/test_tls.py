"""A cluster of real processes with TLS: data, a mount, replicas, and clients without TLS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import threefs
from threefs.cluster import ClusterFile
from threefs.errors import InvalidArgument, ThreeFSError
from threefs.services.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 5 << 20


def test_files_are_written_and_read_over_tls_and_plain_clients_are_refused(
    start_cluster: Callable[..., object], tmp_path: Path
) -> None:
    cluster = start_cluster("tls", "--tls")
    file: Path = cluster.file  # type: ignore[attr-defined]
    assert ClusterFile.read(file).tls
    data = bytes(number * 7 % 251 for number in range(SIZE))
    with threefs.connect(file) as client:
        # Three replicas: data also passes between storage services of a chain.
        with client.open("/one", "wb") as writer:
            writer.write(data)
        with client.open("/one", "rb") as reader:
            assert reader.read() == data
        status = json.loads(client.status())["cluster"]
        assert status["chains"] == status["chains_whole"] >= 1

    plain = json.loads(file.read_text()) | {"tls": False}
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "cluster.json").write_text(json.dumps(plain))
    with (
        threefs.connect(folder, timeout_seconds=10.0) as client,
        pytest.raises(ThreeFSError, match=r"requires TLS; set `tls: true` in the cluster\.json"),
    ):
        client.listdir("/")
    key = ClusterFile.read(file).key_file
    for kind in ("mgmtd", "meta"):
        address, mgmtd = plain["services"][kind], plain["mgmtd"][0]
        probe(kind, address, Path(key), mgmtd, 0, ready=True, timeout_seconds=10.0, tls=True)


def test_a_tls_client_is_refused_by_a_plain_cluster(cluster: object, tmp_path: Path) -> None:
    file: Path = cluster.file  # type: ignore[attr-defined]
    data = json.loads(file.read_text()) | {"tls": True}
    (tmp_path / "cluster.json").write_text(json.dumps(data))
    with (
        threefs.connect(tmp_path, timeout_seconds=10.0) as client,
        pytest.raises(ThreeFSError, match="the service runs without TLS"),
    ):
        client.listdir("/")


def test_a_setting_that_is_not_a_boolean_is_refused(tmp_path: Path) -> None:
    data = {"mgmtd": ["127.0.0.1:1"], "meta": "127.0.0.1:2", "key_file": "key", "tls": "yes"}
    (tmp_path / "cluster.json").write_text(json.dumps(data))
    with pytest.raises(InvalidArgument, match="`tls` is 'yes'; it must be true or false"):
        ClusterFile.read(tmp_path)
