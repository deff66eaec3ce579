"""Two metadata services and two mgmtds over etcd: one of each is killed or stopped under load."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest
from service_load import OPERATION_SECONDS, Load, wait_for_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def cluster(start_cluster: Callable[..., Any], etcd: Any) -> Any:
    return start_cluster(
        "data",
        *("--metas", "2", "--mgmtds", "2", "--etcd-endpoints", ",".join(etcd.endpoints)),
        *("--ready-timeout", "90", "--node-failure-ms", "2000"),
    )


@pytest.fixture
def load(cluster: Any) -> Iterator[Load]:
    load = Load(cluster)
    load.start()
    yield load
    load.stop()
    load.close()


def roles(cluster: Any, kind: str) -> dict[str, dict[str, Any]]:
    """Status of each service of a kind, by its name."""
    names = {address: name for name, address in cluster.status_file()["services"].items()}
    with cluster.client(OPERATION_SECONDS) as client:
        status = json.loads(client.status())
    return {names[each["address"]]: each for each in status[f"{kind}s"]}


def leader(cluster: Any, kind: str) -> str:
    def find() -> str | None:
        leaders = [name for name, each in roles(cluster, kind).items() if each["leads"]]
        return leaders[0] if len(leaders) == 1 else None

    name: str = cluster.wait_for(find, 60, f"one {kind} that leads")
    return name


def wait_for_states(cluster: Any, kind: str, states: set[str]) -> None:
    def reached() -> bool:
        return {each["state"] for each in roles(cluster, kind).values()} == states

    cluster.wait_for(reached, 90, f"{kind}: {states}")


def lose(cluster: Any, load: Load, lost: str, number: signal.Signals) -> None:
    """Kill or stop one service; every worker continues without it."""
    kind = lost.partition("-")[0]
    wait_for_progress(cluster, load)
    load.take_longest()
    pid = cluster.kill(lost, number)
    wait_for_progress(cluster, load)
    if number == signal.SIGSTOP:
        cluster.wait_for(lambda: leader(cluster, kind) != lost, 90, f"a successor of {lost}")
        assert roles(cluster, kind)[lost]["state"] == "unreachable"
        wait_for_progress(cluster, load)
        cluster.kill(lost, signal.SIGCONT)
    if number == signal.SIGKILL or kind == "meta":
        # A metadata service that others have removed exits; its next start is a new one.
        cluster.wait_for(lambda: cluster.pid(lost) != pid, 60, f"a start of {lost}")
    healthy = {"meta": {"serving"}, "mgmtd": {"serving", "standby"}}
    wait_for_states(cluster, kind, healthy[kind])
    # Operations that have waited end, and count.
    wait_for_progress(cluster, load)
    print(f"{number.name} of {lost}: {load.take_longest()}", flush=True)


@pytest.mark.timeout(400)
def test_a_lost_meta_or_mgmtd_loses_no_acknowledged_operation(cluster: Any, load: Load) -> None:
    for lost in ("meta", "meta-2", leader(cluster, "mgmtd")):
        lose(cluster, load, lost, signal.SIGKILL)
    # The other one leads after the first of two.
    for kind in ("meta", "meta", "mgmtd"):
        lose(cluster, load, leader(cluster, kind), signal.SIGSTOP)
    wait_for_progress(cluster, load)
    load.stop()
    print("rounds:", load.rounds())
    load.check_contents()


def test_a_folder_gets_more_services_and_fewer(
    start_cluster: Callable[..., Any], etcd: Any
) -> None:
    options = ("--etcd-endpoints", ",".join(etcd.endpoints), "--ready-timeout", "90")
    one = start_cluster("data", *options)
    ports = one.status_file()["services"]
    with one.client() as client:
        client.write_file("/file", b"data")
    one.stop()
    for metas, mgmtds in ((3, 2), (1, 1)):
        counts = ("--metas", str(metas), "--mgmtds", str(mgmtds))
        cluster = start_cluster("data", *options, *counts)
        assert ports.items() <= cluster.status_file()["services"].items()
        assert len(cluster.status_file()["mgmtd"]) == mgmtds
        status = cluster.status()
        assert [each["state"] for each in status["metas"]] == ["serving"] * metas
        states = sorted(each["state"] for each in status["mgmtds"])
        assert states == ["serving", "standby"][:mgmtds]
        with cluster.client() as client:
            assert client.read_file("/file") == b"data"
        cluster.stop()
