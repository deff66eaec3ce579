"""`threefs serve --metadata etcd`: members that run here, killed, restarted and converted."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from service_load import OPERATION_SECONDS, Load, wait_for_progress
from threefs.cli.members import member_states
from threefs.cluster import ClusterFile

if TYPE_CHECKING:
    from collections.abc import Callable

MEMBERS = ("etcd", "etcd-2", "etcd-3")
TIMERS = ("--ready-timeout", "120", "--node-failure-ms", "2000")


@pytest.fixture
def start(start_cluster: Callable[..., Any], etcd_program: Path) -> Callable[..., Any]:
    """Start a cluster that runs its members, in the folder `data`."""

    def start(*options: str) -> Any:
        binary = ("--etcd-binary", str(etcd_program))
        return start_cluster("data", "--metadata", "etcd", *binary, *TIMERS, *options)

    return start


def members(cluster: Any) -> list[dict[str, Any]]:
    return member_states(ClusterFile.read(cluster.file).etcd, 5.0)


def healthy(cluster: Any) -> bool:
    """Whether every service and member serves."""
    etcd = members(cluster)
    if [each["state"] for each in etcd] != ["serving"] * len(MEMBERS):
        return False
    with cluster.client(OPERATION_SECONDS) as client:
        status = json.loads(client.status())
    states = {each["state"] for kind in ("mgmtds", "metas") for each in status[kind]}
    whole: bool = status["cluster"]["chains_whole"] == status["cluster"]["chains"]
    return whole and sum(each["leads"] for each in etcd) == 1 and states <= {"serving", "standby"}


def refused(folder: Path, *options: str, path: str | None = None) -> tuple[int, str]:
    command = [sys.executable, "-m", "threefs", "serve", "--data", str(folder), *options]
    environment = os.environ if path is None else os.environ | {"PATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.timeout(900)
def test_every_service_and_member_is_killed_under_load_and_recovers(
    start: Callable[..., Any],
) -> None:
    cluster = start("--metas", "2", "--mgmtds", "2")
    services = cluster.status_file()["services"]
    assert set(services) > {*MEMBERS, "mgmtd-2", "meta-2"}
    load = Load(cluster)
    load.start()
    try:
        for name in services:
            wait_for_progress(cluster, load)
            killed = cluster.kill(name)
            wait_for_progress(cluster, load)
            cluster.wait_for(lambda n=name, p=killed: cluster.pid(n) != p, 90, f"start of {name}")
            cluster.wait_for(lambda: healthy(cluster), 120, f"recovery of {name}")
            print(f"SIGKILL of {name}: {load.take_longest()}", flush=True)
        wait_for_progress(cluster, load)
        load.stop()
        load.check_contents()
        pids = cluster.status_file()["pids"]
        assert set(pids) == set(services)
        # The supervisor too, and everything with it.
        cluster.process.kill()
        cluster.process.wait(timeout=60)
        cluster.wait_for(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()),
            60,
            "end of all services",
        )
        cluster = start("--metas", "2", "--mgmtds", "2")
        assert cluster.status_file()["services"] == services
        load.check_contents()
    finally:
        load.stop()
        load.close()


def test_members_accept_only_the_certificate_of_the_folder(start: Callable[..., Any]) -> None:
    cluster = start()
    etcd = ClusterFile.read(cluster.file).etcd
    assert etcd.ca_file is not None
    assert etcd.key_file is not None
    assert etcd.key_file.stat().st_mode & 0o777 == 0o600
    for name in MEMBERS:
        settings = json.loads((cluster.folder / "config" / f"{name}.json").read_text())
        urls = [each for each in settings["command"] if each.startswith("--listen-")]
        assert len(urls) == 2
        for url in urls:
            host, port = url.partition("//")[2].split(":")
            assert host == "127.0.0.1"
            context = ssl.create_default_context(cafile=etcd.ca_file)
            with pytest.raises((ssl.SSLError, ConnectionError), match=r"required|reset"):
                first_byte(host, int(port), context)
            # The member certifies itself; its own certificate is accepted.
            context.load_cert_chain(str(etcd.cert_file), str(etcd.key_file))
            assert first_byte(host, int(port), context) == b"H"


def first_byte(host: str, port: int, context: ssl.SSLContext) -> bytes:
    with (
        socket.create_connection((host, port), 60) as plain,
        context.wrap_socket(plain, server_hostname=host) as secured,
    ):
        secured.sendall(b"GET /version HTTP/1.1\r\nHost: member\r\n\r\n")
        return secured.recv(1)


def test_the_status_shows_members_and_one_that_is_stopped(start: Callable[..., Any]) -> None:
    cluster = start()
    command = [sys.executable, "-m", "threefs", "status", "-c", str(cluster.file)]
    table = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert table.count(" etcd ") == len(MEMBERS)
    assert table.count("leader") == 1
    pid = cluster.kill("etcd-2", signal.SIGSTOP)
    try:
        # Not the exit status: the metadata service may still wait for another leader.
        status = subprocess.run(
            [*command, "-o", "json", "--timeout", "30"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    states = {each["address"]: each for each in json.loads(status.stdout)["etcd_members"]}
    stopped = states[cluster.status_file()["services"]["etcd-2"]]
    assert stopped["state"] == "unreachable"
    assert stopped["detail"]
    assert len(states) == len(MEMBERS)


@pytest.mark.timeout(400)
def test_a_folder_is_converted_to_etcd_and_back(
    start_cluster: Callable[..., Any], etcd_program: Path
) -> None:
    binary = ("--etcd-binary", str(etcd_program))
    cluster = start_cluster("data", *TIMERS)
    with cluster.client() as client:
        client.write_file("/first", b"1" * 100_000)
    cluster.stop()
    to_etcd = ("--metadata", "etcd", *binary)
    status, error = refused(cluster.folder, *to_etcd)
    assert status == 2
    assert "was created with --metadata embedded, not etcd" in error
    assert "add --convert" in error
    # Killed between the conversion and the start: it is repeated, from what the folder had.
    (cluster.folder / "data" / "etcd" / "member").mkdir(parents=True)
    cluster = start_cluster("data", *TIMERS, *to_etcd, "--convert", "--metas", "2")
    with cluster.client() as client:
        assert client.read_file("/first") == b"1" * 100_000
        client.write_file("/second", b"2" * 100_000)
    cluster.stop()
    status, error = refused(cluster.folder)
    assert status == 2
    assert "was created with --metadata etcd, not embedded" in error
    status, error = refused(cluster.folder, "--etcd-endpoints", "http://127.0.0.1:1")
    assert status == 2
    assert "is in its own etcd members" in error
    # A conversion that is not needed any more changes nothing.
    start_cluster("data", *TIMERS, *to_etcd, "--convert").stop()
    cluster = start_cluster("data", *TIMERS, "--convert", *binary)
    assert not {*MEMBERS} & cluster.status_file()["pids"].keys()
    with cluster.client() as client:
        assert client.read_file("/first") == b"1" * 100_000
        assert client.read_file("/second") == b"2" * 100_000


@pytest.mark.timeout(200)
def test_a_conversion_that_fails_changes_nothing(
    start_cluster: Callable[..., Any], etcd_program: Path, tmp_path: Path
) -> None:
    cluster = start_cluster("data", *TIMERS)
    with cluster.client() as client:
        client.write_file("/file", b"data")
    cluster.stop()
    broken = tmp_path / "etcd-broken"
    broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {etcd_program} "$@"\nexit 1\n')
    broken.chmod(0o755)
    options = ("--metadata", "etcd", "--convert", "--etcd-binary", str(broken))
    status, error = refused(cluster.folder, *options)
    assert status == 106
    assert "failed, and changed nothing" in error
    cluster = start_cluster("data", *TIMERS)
    with cluster.client() as client:
        assert client.read_file("/file") == b"data"


@pytest.mark.timeout(300)
def test_a_member_without_its_log_is_not_started(start: Callable[..., Any]) -> None:
    cluster = start()
    cluster.stop()
    log = cluster.folder / "data" / "etcd-2" / "member" / "wal"
    log.rename(cluster.folder / "wal")
    binary = json.loads((cluster.folder / "config" / "etcd.json").read_text())["command"][0]
    status, error = refused(cluster.folder, "--metadata", "etcd", "--etcd-binary", binary)
    assert status == 106
    assert f"`{log}` of the etcd member etcd-2 is missing; put it back" in error
    (cluster.folder / "wal").rename(log)
    start()
