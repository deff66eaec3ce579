"""`threefs serve`: one owner of a folder, fixed ports, no surviving processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import threefs
from threefs.cluster import ClusterFile
from threefs.supervisor import ServeOptions, Supervisor
from threefs.supervisor.ports import choose_ports, who_listens


def run_serve(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "threefs", "serve", "--data", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_supervisor_of_a_folder_is_refused_and_names_the_first(cluster: Any) -> None:
    second = run_serve(cluster.folder)
    assert second.returncode == 1
    assert f"already served by process {cluster.process.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert cluster.file.exists()


def test_a_taken_port_is_named_with_its_holder(start_cluster: Any) -> None:
    cluster = start_cluster()
    cluster.stop()
    port = json.loads((cluster.folder / "settings.json").read_text())["ports"]["meta"]
    with socket.create_server(("127.0.0.1", port)):
        second = run_serve(cluster.folder)
    assert second.returncode == 106
    assert f"port {port} of `meta`" in second.stderr
    assert f"process {os.getpid()}" in second.stderr


def test_ports_and_data_are_kept_over_a_restart(start_cluster: Any) -> None:
    cluster = start_cluster()
    services = cluster.status_file()["services"]
    with cluster.client() as client:
        client.write_file("/file", b"data")
        cluster.stop()
        assert cluster.status_file()["pids"] == {}
        start_cluster()
        assert client.read_file("/file") == b"data"
    assert cluster.status_file()["services"] == services


def test_counts_that_differ_from_those_of_the_folder_are_refused(start_cluster: Any) -> None:
    cluster = start_cluster()
    cluster.stop()
    second = run_serve(cluster.folder, "--storage", "4")
    assert second.returncode == 2
    assert "was created with --storage 3, not 4" in second.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_service_survives_the_supervisor(start_cluster: Any, number: signal.Signals) -> None:
    cluster = start_cluster()
    pids = cluster.status_file()["pids"].values()
    assert len(pids) == 5
    cluster.process.send_signal(number)
    cluster.process.wait(timeout=60)
    cluster.wait_for(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, "end of all services"
    )
    if number is not signal.SIGKILL:
        assert cluster.process.returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--storage", "2"], "--replicas is 3; it must be at most"),
        (["--storage", "0"], "--storage is 0"),
        (["--chunk-size", "100000"], "--chunk-bytes is 100000; it must be a power of two"),
        (["--capacity", "much"], "invalid size `much`: expected"),
        (["--restart-after", "-1"], "--restart-after"),
        (
            ["--metas", "2"],
            "--metas is 2; it must be 1, unless --metadata etcd, --etcd-endpoints or",
        ),
        (
            ["--metadata", "etcd", "--etcd-endpoints", "http://127.0.0.1:1"],
            "--metadata is etcd; it must be left out with --etcd-endpoints",
        ),
        (
            ["--metadata", "etcd", "--postgres-url", "postgresql://me@127.0.0.1:1/db"],
            "--metadata is etcd; it must be left out with --postgres-url",
        ),
        (["--postgres-schema", "a"], "given with the other --postgres options"),
        (["--etcd-binary", "/bin/etcd"], "--etcd-binary is /bin/etcd; it must be given with"),
        (["--metadata", "etcd", "--etcd-prefix", "/a"], "given with the other --etcd options"),
        (["--mgmtds", "0"], "--mgmtds is 0; it must be at least 1"),
        (
            ["--mgmtds", "17", "--etcd-endpoints", "http://127.0.0.1:1"],
            "--mgmtds is 17; it must be at most 16",
        ),
    ],
)
def test_errors_name_the_invalid_option(tmp_path: Path, options: list[str], words: str) -> None:
    result = run_serve(tmp_path / "data", *options)
    assert result.returncode == 2
    assert words in result.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (None, "no `etcd` is on the PATH"),
        ("", "is not a program"),
        ("echo etcd Version: 3.4.23", "is etcd 3.4: install etcd 3.5 or newer"),
        ("echo 3.6", "shows no version of etcd"),
    ],
)
def test_an_etcd_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, words: str
) -> None:
    options = ["--metadata", "etcd"]
    monkeypatch.setenv("PATH", str(tmp_path))
    if program is not None:
        binary = tmp_path / "etcd-given"
        options += ["--etcd-binary", str(binary)]
        if program:
            binary.write_text(f"#!/bin/sh\n{program}\n")
            binary.chmod(0o755)
    result = run_serve(tmp_path / "data", *options)
    assert result.returncode == 106
    assert words in result.stderr
    assert "or name one with --etcd-binary" in result.stderr
    assert not (tmp_path / "data").exists()


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(threefs.InvalidArgument, match=r"file/data. cannot be created"):
        Supervisor(ServeOptions(data=tmp_path / "file" / "data"), print).run(print)


def test_chosen_ports_are_different_and_outside_the_systems_range() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = choose_ports(50)
    assert len(set(ports)) == 50
    assert all(port < first for port in ports)


def test_a_port_is_chosen_by_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing listens there yet."""
    monkeypatch.setattr("random.shuffle", lambda _: None)
    code = (
        "import random, sys; random.shuffle = lambda _: None\n"
        "from threefs.supervisor.ports import choose_ports\n"
        "print(*choose_ports(5), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = [*choose_ports(5), *choose_ports(5)]
        other.communicate()
    assert len(theirs) == 5
    assert len({*ours, *theirs}) == 15


def test_the_process_that_listens_on_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert str(os.getpid()) in who_listens(server.getsockname()[1])
    assert who_listens(1) == "no listening process"


def test_a_cluster_file_names_one_metadata_service_or_several(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    for addresses, written in ((("a:2",), "a:2"), (("a:2", "b:2"), ["a:2", "b:2"])):
        ClusterFile(("a:1",), addresses, "key").write(path)
        assert json.loads(path.read_text())["meta"] == written
        assert ClusterFile.read(path).meta == addresses


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read as JSON"),
        ("[]", "must be an object"),
        ('{"mgmtd": "127.0.0.1:1"}', "`mgmtd` is '127.0.0.1:1'"),
        ('{"mgmtd": ["a:1"], "meta": 5}', "`meta` is 5"),
        ('{"mgmtd": ["a:1"], "meta": ["a:2", 5]}', "`meta` is ['a:2', 5]"),
        ('{"mgmtd": ["a:1"], "meta": []}', "`meta` is []"),
        ('{"mgmtd": ["a:1"], "meta": "a:2"}', "`key_file` is None"),
        (
            '{"mgmtd": ["a:1"], "meta": "a:2", "key_file": "k", "etcd": {"endpoints": "a:1"}}',
            "`etcd` is {'endpoints': 'a:1'}",
        ),
    ],
)
def test_a_wrong_cluster_file_is_named_with_its_field(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(threefs.InvalidArgument, match=str(path)) as excinfo:
        ClusterFile.read(path)
    assert words in str(excinfo.value)


def test_connecting_without_a_cluster_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(threefs.NotFound, match="threefs serve"):
        threefs.connect(tmp_path / "none.json")
    monkeypatch.delenv("THREEFS_CLUSTER", raising=False)
    with pytest.raises(threefs.InvalidArgument, match="THREEFS_CLUSTER"):
        threefs.connect()
