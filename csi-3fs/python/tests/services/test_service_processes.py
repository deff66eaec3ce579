"""`threefs-service` as in pods: real processes, changing addresses, wiped disks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import threefs
from threefs.cluster import ClusterFile
from threefs.supervisor.ports import choose_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_SECONDS = 60.0


@dataclass
class Pods:
    """Services of one cluster; every storage node has a separate name that resolves to it."""

    folder: Path
    ports: list[int]
    replicas: int = 3
    failure_ms: int = 600
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "key").write_text("k" * 64)
        file = ClusterFile((self.address("mgmtd"),), (self.address("meta"),), "key")
        file.write(self.folder / "cluster.json")

    def address(self, name: str) -> str:
        names = ["mgmtd", "meta", *(f"storage-{number}" for number in range(4))]
        return f"localhost:{self.ports[names.index(name)]}"

    def arguments(self, name: str) -> list[str]:
        port = self.address(name).rpartition(":")[2]
        shared = ["--data", str(self.folder / name), "--key-file", str(self.folder / "key")]
        listen = ["--listen", f"0.0.0.0:{port}"]
        failure = ["--node-failure-ms", str(self.failure_ms)]
        if name == "mgmtd":
            nodes = ["--storage-nodes", "3", "--replicas", str(self.replicas)]
            advertise = ["--advertise", self.address(name), "--chains-per-node", "1"]
            return ["mgmtd", *shared, *listen, *advertise, *nodes, *failure]
        mgmtd = ["--mgmtd", self.address("mgmtd")]
        if name == "meta":
            return ["meta", *shared, *listen, *mgmtd]
        advertise = ["--advertise", self.address(name), "--pod-name", name]
        return ["storage", *shared, *listen, *mgmtd, *advertise, *failure]

    def start(self, name: str, *more: str) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-c", MAIN, *self.arguments(name), *more],
                stderr=log,
                stdout=log,
                text=True,
            )

    def start_all(self) -> None:
        for name in ("mgmtd", "meta", "storage-0", "storage-1", "storage-2"):
            self.start(name)

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(timeout=PATIENCE_SECONDS)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def client(self) -> threefs.Client:
        return threefs.connect(self.folder / "cluster.json", timeout_seconds=PATIENCE_SECONDS)

    def check(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        key = ["--key-file", str(self.folder / "key")]
        return subprocess.run(
            [sys.executable, "-c", MAIN, "check", *arguments, *key],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def states(self) -> dict[int, list[str]]:
        """States of the targets by node."""
        with threefs.connect(self.folder / "cluster.json", timeout_seconds=20.0) as client:
            chains = json.loads(client.status())["routing"]["chains"].values()
        states_by_node: dict[int, list[str]] = {}
        for chain in chains:
            for place in chain["targets"]:
                states_by_node.setdefault(place["node"], []).append(place["state"])
        return states_by_node

    def kill_one_by_one(self, names: tuple[str, ...]) -> None:
        """Kill all storage processes, so that the last one is the last that served its chains."""
        for killed, name in enumerate(names, start=1):
            self.stop(name, signal.SIGKILL)
            served = {int(each[-1]) + 1 for each in names[killed:]}
            self.wait_states(
                lambda states, served=served: (  # type: ignore[misc]
                    {node for node, of_node in states.items() if "SERVING" in of_node} == served
                    and all(set(states[node]) == {"SERVING"} for node in served)
                )
            )

    def wait_states(self, expected: Callable[[dict[int, list[str]]], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        states: dict[int, list[str]] = {}
        while time.monotonic() < deadline:
            try:
                states = self.states()
            except threefs.ThreeFSError:
                continue
            if expected(states):
                return
            time.sleep(0.05)
        raise AssertionError(f"{states}\n{self.log('mgmtd')}")


MAIN = "import sys; from threefs.services.cli import main; sys.exit(main())"


def all_serve(states: dict[int, list[str]]) -> bool:
    return len(states) == 3 and all(set(of_node) == {"SERVING"} for of_node in states.values())


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    pods = Pods(tmp_path, choose_ports(6))
    yield pods
    for process in pods.processes.values():
        process.kill()
        process.wait()


def test_chains_are_created_automatically_and_probes_report_it(pods: Pods) -> None:
    ready = ("storage", "--ready", "--pod-name", "storage-1", "--mgmtd", pods.address("mgmtd"))
    assert pods.check(*ready, "--listen", pods.address("storage-1")).returncode != 0
    pods.start_all()
    pods.wait_states(all_serve)
    for arguments in (
        ("mgmtd", "--listen", pods.address("mgmtd")),
        ("mgmtd", "--ready", "--listen", pods.address("mgmtd")),
        ("meta", "--ready", "--listen", pods.address("meta"), "--mgmtd", pods.address("mgmtd")),
        ("storage", "--pod-name", "storage-1", "--listen", pods.address("storage-1")),
        (*ready, "--listen", pods.address("storage-1")),
    ):
        result = pods.check(*arguments)
        assert result.returncode == 0, (arguments, result.stderr)
    wrong = pods.check("storage", "--ready", "--node-id", "9", *ready[4:])
    assert wrong.returncode != 0
    with pods.client() as client:
        nodes = json.loads(client.status())["cluster"]["nodes"]
        assert {node["address"] for node in nodes} == {
            pods.address(f"storage-{number}") for number in range(3)
        }


def test_a_terminated_node_is_removed_from_its_chains_immediately(pods: Pods) -> None:
    # A failure is detected later than this test ends.
    pods.failure_ms = 600_000
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        client.write_file("/before", b"a" * 100_000)
        assert pods.stop("storage-1") == 0
        assert "SERVING" not in pods.states()[2]
        client.write_file("/during", b"b" * 100_000)
        pods.start("storage-1")
        pods.wait_states(all_serve)
        assert client.read_file("/before") == b"a" * 100_000
        assert client.read_file("/during") == b"b" * 100_000


def test_a_pod_that_moves_is_found_at_its_new_address(pods: Pods) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        client.write_file("/file", b"x" * 100_000)
        pods.stop("storage-2", signal.SIGKILL)
        pods.wait_states(lambda states: "SERVING" not in states[3])
        pods.ports[4] = choose_ports(1)[0]
        pods.start("storage-2")
        pods.wait_states(all_serve)
        client.write_file("/file", b"y" * 100_000)
        assert client.read_file("/file") == b"y" * 100_000


def test_a_wiped_disk_does_not_lead_its_chains(pods: Pods) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        client.write_file("/file", b"precious" * 10_000)
        # node-1 is the last one that serves; then its disk is lost, and only node-1 returns.
        pods.kill_one_by_one(("storage-1", "storage-2", "storage-0"))
        assert pods.states()[1] == ["LASTSRV"] * 3
        moved_away = pods.folder / "kept"
        shutil.move(pods.folder / "storage-0", moved_away)
        pods.start("storage-0")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "but could lead a chain" not in pods.log("storage-0"):
            assert time.monotonic() < deadline, pods.log("storage-0")
            time.sleep(0.05)
        pods.start("storage-1")
        pods.wait_states(lambda states: states[2] == ["WAITING"] * 3)
        assert pods.states()[1] == ["LASTSRV"] * 3
        with pytest.raises(threefs.InvalidArgument, match="cannot be promoted"):
            client.promote(99)
        # The disk returns: no data was lost.
        pods.stop("storage-0")
        shutil.rmtree(pods.folder / "storage-0")
        shutil.move(moved_away, pods.folder / "storage-0")
        pods.start("storage-0")
        pods.start("storage-2")
        pods.wait_states(all_serve)
        assert client.read_file("/file") == b"precious" * 10_000


def promotion(client: threefs.Client, target: int) -> Any:
    """Consequences of promoting `target`; None if no chunk of the file is on its chain."""
    try:
        return json.loads(client.promote(target))
    except threefs.InvalidArgument as error:
        if "its store is empty" in str(error):
            return None
        raise


def test_a_remaining_copy_is_promoted_and_fills_the_new_disk(pods: Pods) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        client.write_file("/file", b"precious" * 10_000)
        pods.kill_one_by_one(("storage-1", "storage-2", "storage-0"))
        shutil.rmtree(pods.folder / "storage-0")
        pods.start("storage-0")
        pods.start("storage-1")
        pods.wait_states(lambda states: states[2] == ["WAITING"] * 3)
        chains = json.loads(client.status())["routing"]["chains"].values()
        copies = [
            place["target"] for chain in chains for place in chain["targets"] if place["node"] == 2
        ]
        holding = []
        for target in copies:
            meaning = promotion(client, target)
            if meaning is not None:
                assert meaning["was_complete"]
                assert [node for _, node in meaning["served_last"]] == [1]
                holding.append(target)
        assert holding
        for target in holding:
            client.promote(target, apply=True)
        assert client.read_file("/file") == b"precious" * 10_000


def test_after_a_power_loss_any_disk_that_served_may_lead(pods: Pods) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        client.write_file("/file", b"precious" * 10_000)
        for number in range(3):
            pods.processes[f"storage-{number}"].send_signal(signal.SIGSTOP)
        pods.wait_states(lambda states: "SERVING" not in [*states[1], *states[2], *states[3]])
        for number in range(3):
            pods.stop(f"storage-{number}", signal.SIGKILL)
        # The disk that led the first chain is lost permanently; no operator action is needed.
        shutil.rmtree(pods.folder / "storage-0")
        for number in range(3):
            pods.start(f"storage-{number}")
        pods.wait_states(all_serve)
        assert client.read_file("/file") == b"precious" * 10_000


def test_a_replaced_disk_is_resynced_from_the_others(pods: Pods) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        client.write_file("/file", b"copied" * 20_000)
        pods.stop("storage-1", signal.SIGKILL)
        pods.wait_states(lambda states: "SERVING" not in states[2])
        shutil.rmtree(pods.folder / "storage-1")
        pods.start("storage-1")
        pods.wait_states(all_serve)
        for name in ("storage-0", "storage-2"):
            pods.stop(name)
        assert client.read_file("/file") == b"copied" * 20_000


def test_a_node_that_is_added_gets_its_share_and_old_files_stay_readable(pods: Pods) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    contents = {f"/old-{number}": bytes([number]) * 300_000 for number in range(6)}
    with pods.client() as client:
        for path, content in contents.items():
            client.write_file(path, content)
        pods.start("storage-3")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            # Readable at any time during the moves.
            for path, content in contents.items():
                assert client.read_file(path) == content
            routing = json.loads(client.status())["routing"]
            serving = dict.fromkeys(("1", "2", "3", "4"), 0)
            for chain in routing["chains"].values():
                for place in chain["targets"]:
                    serving[str(place["node"])] += place["state"] == "SERVING"
            if list(serving.values()) == [3, 3, 3, 3] and not routing["moves"]:
                break
            assert time.monotonic() < deadline, (serving, pods.log("mgmtd"))
        assert len(routing["chains"]) == 4
        assert routing["retired"]
        assert json.loads(client.rebalance())["moves"] == []
        # Data of moved replicas is removed from the disk.
        folders = [
            pods.folder / f"storage-{node}" / "storage" / f"target-{target}"
            for target in routing["retired"]
            for node in range(4)
        ]
        while any(folder.exists() for folder in folders):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # The new node holds data: two of the old ones may fail, one after the other.
        client.write_file("/new", b"n" * 300_000)
        pods.stop("storage-0", signal.SIGKILL)
        for path, content in contents.items():
            assert client.read_file(path) == content
        client.write_file("/new", b"m" * 300_000)
        assert client.read_file("/new") == b"m" * 300_000


def test_another_nodes_disk_is_refused(pods: Pods) -> None:
    identity = pods.folder / "storage-0" / "storage" / "identity.json"
    identity.parent.mkdir(parents=True)
    identity.write_text(json.dumps({"version": 1, "node": 3, "disk": "d"}))
    pods.start("storage-0")
    assert pods.processes.pop("storage-0").wait(PATIENCE_SECONDS) == 1
    assert "belongs to node-3 and this is service node-1" in pods.log("storage-0")


def test_an_empty_disk_waits_for_mgmtd_and_ends_immediately_when_stopped(pods: Pods) -> None:
    pods.start("storage-0")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "mgmtd has not replied yet" not in pods.log("storage-0"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list((pods.folder / "storage-0").rglob("identity.json"))
    assert pods.stop("storage-0") == 0


def test_the_key_is_never_on_a_command_line(pods: Pods) -> None:
    pods.start("mgmtd")
    command = Path(f"/proc/{pods.processes['mgmtd'].pid}/cmdline").read_bytes()
    assert b"k" * 64 not in command
    assert os.environ.get("THREEFS_KEY") is None


def test_mgmtd_without_its_store_makes_no_chains_over_the_data_of_the_old_ones(
    pods: Pods,
) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        client.write_file("/kept", b"kept" * 100_000)
    for name in tuple(pods.processes):
        pods.stop(name, signal.SIGKILL)
    (pods.folder / "mgmtd").rename(pods.folder / "backup")
    for name in ("mgmtd", "storage-0", "storage-1", "storage-2"):
        pods.start(name)
    for number in range(3):
        name = f"storage-{number}"
        assert pods.processes.pop(name).wait(PATIENCE_SECONDS) != 0
        assert "holds data of cluster-" in pods.log(name), pods.log(name)
        assert "threefs mgmtd load" in pods.log(name)
    assert pods.states() == {}, "no chain was made"
    pods.stop("mgmtd")
    shutil.rmtree(pods.folder / "mgmtd")
    (pods.folder / "backup").rename(pods.folder / "mgmtd")
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        assert client.read_file("/kept") == b"kept" * 100_000


def test_a_node_with_data_of_another_cluster_is_refused(pods: Pods) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    pods.stop("storage-0")
    marks = list((pods.folder / "storage-0").rglob("cluster"))
    assert marks
    before = marks[0].read_text()
    marks[0].write_text(f"{int(before, 16) ^ 1:032x}\n")
    pods.start("storage-0")
    assert pods.processes.pop("storage-0").wait(PATIENCE_SECONDS) != 0
    assert "node-1 holds data of cluster-" in pods.log("storage-0")
    marks[0].write_text(before)
    pods.start("storage-0")
    pods.wait_states(all_serve)


def test_meta_without_its_store_is_refused_until_the_store_is_restored_or_another_adopted(
    pods: Pods, tmp_path: Path
) -> None:
    pods.start_all()
    pods.wait_states(all_serve)
    with pods.client() as client:
        client.write_file("/kept", b"kept" * 500_000)
    pods.stop("meta", signal.SIGKILL)
    (pods.folder / "meta").rename(tmp_path / "backup")
    pods.start("meta")
    assert pods.processes.pop("meta").wait(PATIENCE_SECONDS) != 0
    assert "the metadata store holds tree-" in pods.log("meta"), pods.log("meta")
    assert "threefs meta adopt" in pods.log("meta")
    empty = next((pods.folder / "meta").rglob("data.mdb")).parent
    (pods.folder / "meta").rename(tmp_path / "empty")
    (tmp_path / "backup").rename(pods.folder / "meta")
    pods.start("meta")
    with pods.client() as client:
        assert client.read_file("/kept") == b"kept" * 500_000
        inode = client.stat("/kept").inode
    pods.stop("meta")
    (pods.folder / "meta").rename(tmp_path / "lost")
    (tmp_path / "empty").rename(pods.folder / "meta")
    adopt = [sys.executable, "-m", "threefs", "meta", "adopt", "--data", str(empty)]
    refused = subprocess.run(adopt, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "--yes" in refused.stderr
    subprocess.run([*adopt, "--yes"], timeout=60, check=True)
    pods.start("meta")
    with pods.client() as client:
        assert client.listdir("/") == []
        # The chunks of /kept still exist: no new file may contain them.
        with client.open_raw("/new", "w") as file:
            file.truncate(2_000_000)
        assert client.stat("/new").inode > inode + (1 << 51)
        assert client.read_file("/new") == bytes(2_000_000)
