"""`threefs drain` and failure domains, with real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import typer
from threefs.cli import drain
from threefs.cli.drain import nodes_of
from threefs.cli.output import Output
from threefs.errors import InvalidArgument

sys.path.insert(0, str(Path(__file__).parent))

from test_service_processes import PATIENCE_SECONDS, Pods, all_serve, pods

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["pods"]

STATUS = {
    "routing": {
        "nodes": {
            "1": {"location": "A/r1/h1"},
            "2": {"location": "A/r1/h2"},
            "3": {"location": "A/r2/h3"},
            "14": {"location": ""},
            "1000014": {"location": ""},
            "15": {"location": "A/r2/node-14"},
        }
    }
}


@pytest.mark.parametrize(
    ("names", "nodes"),
    [
        (["1"], {1}),
        (["node-14.1", "3"], {3, 1_000_014}),
        (["14", "1000014"], {14, 1_000_014}),
        (["service-14"], {14, 1_000_014}),
        (["h2"], {2}),
        (["r1"], {1, 2}),
        (["A/r1"], {1, 2}),
        (["A"], {1, 2, 3, 15}),
        (["A/r2/node-14"], {15}),
    ],
)
def test_a_node_is_given_by_number_or_domain(names: Sequence[str], nodes: set[int]) -> None:
    assert nodes_of(names, STATUS) == nodes


@pytest.mark.parametrize("name", ["9", "node-", "node-3.1", "14.1", "h", "A/r", "", "/"])
def test_an_unknown_node_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"unknown node `.*`: the nodes are node-1, node-2, node-3, node-14, .*node-14\.1.*h1",
    ):
        nodes_of([name], STATUS)


def test_a_name_of_a_node_and_of_a_host_with_another_node_is_refused() -> None:
    with pytest.raises(
        InvalidArgument, match=r"rack or host with node-15, .* nodes, 14, or .* `A/r2/node-14`"
    ):
        nodes_of(["node-14"], STATUS)


class FakeClient:
    """A cluster whose node 3 keeps one replica; the drain is stuck, or is cancelled elsewhere."""

    def __init__(self, *, cancelled: bool) -> None:
        self._leaving: list[int] = []
        self._cancelled = cancelled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> str:
        nodes: dict[str, Any] = {str(node): {} for node in (1, 2, 3)}
        chains = {"1": {"targets": [{"node": 1}, {"node": 3}]}}
        routing = {"nodes": nodes, "chains": chains}
        used = [{"node": node, "used_bytes": 1} for node in (1, 2, 3)]
        return json.dumps({"routing": routing, "cluster": {"nodes": used}})

    def drain(self, nodes: Sequence[int], *, apply: bool, cancel: bool) -> str:
        assert apply
        assert not cancel
        self._leaving = [] if self._cancelled else list(nodes)
        return self.rebalance()

    def moves(self, *, plan: bool) -> None:
        """It is older than this report."""
        assert plan

    def rebalance(self) -> str:
        plan = {"leaving": self._leaving, "moves": [], "under_way": []}
        return json.dumps({**plan, "stuck": 0 if self._cancelled else 1})


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_drain_that_ends_without_empty_nodes_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, cancelled: bool
) -> None:
    client = FakeClient(cancelled=cancelled)
    monkeypatch.setattr(drain, "connect", lambda *_, **__: client)
    request = drain.Drain(apply=True, cancel=False, wait=True, stalled_seconds=600)
    with pytest.raises(typer.Exit) as end:
        drain.drain_nodes(None, Output.TABLE, 10.0, ["3"], request)
    assert end.value.exit_code == 1
    shown = capsys.readouterr().out
    assert ("no node is drained" if cancelled else "1 replicas cannot move") in shown
    assert "can be removed" not in shown


def threefs(pods: Pods, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = "import sys; from threefs.cli.app import main; sys.exit(main())"
    cluster = ["--cluster", str(pods.folder / "cluster.json"), "--timeout", "30"]
    result = subprocess.run(
        [sys.executable, "-c", command, *arguments, *cluster],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == status, result.stderr
    return result


def nodes_by_chain(pods: Pods) -> list[set[int]]:
    status: dict[str, Any] = json.loads(threefs(pods, "status", "-o", "json").stdout)
    chains = status["routing"]["chains"].values()
    return [{place["node"] for place in chain["targets"]} for chain in chains]


def start(pods: Pods) -> None:
    """Two nodes on host a, one on host b."""
    pods.replicas = 2
    for name in ("mgmtd", "meta"):
        pods.start(name)
    for number, host in enumerate(("a", "a", "b")):
        pods.start(f"storage-{number}", "--host", host)
    pods.wait_states(all_serve)


def test_a_host_is_drained_and_its_data_stays(pods: Pods) -> None:
    start(pods)
    assert all(nodes & {1, 2} and 3 in nodes for nodes in nodes_by_chain(pods))
    shown = threefs(pods, "status").stdout
    assert "replicas of a chain are on different hosts" in shown
    assert "//b" in shown
    with pods.client() as client:
        client.write_file("/file", b"kept" * 100_000)
        pods.start("storage-3", "--host", "c")
        pods.wait_states(lambda states: set(states) == {1, 2, 3, 4})
        plan = json.loads(threefs(pods, "drain", "b", "-o", "json").stdout)
        assert (plan["leaving"], plan["applied"]) == ([3], False)
        assert plan["replicas"] > 0
        result = threefs(pods, "drain", "b", "--apply")
        assert "node-3: empty" in result.stdout
        assert all(3 not in nodes and nodes != {1, 2} for nodes in nodes_by_chain(pods))
        pods.stop("storage-2", signal.SIGKILL)
        assert client.read_file("/file") == b"kept" * 100_000
    result = threefs(pods, "drain", "--cancel", "--apply", "-o", "json")
    assert json.loads(result.stdout)["leaving"] == []


def test_a_drain_that_leaves_one_host_reports_it(pods: Pods) -> None:
    start(pods)
    result = threefs(pods, "drain", "3", "--apply")
    assert "replicas of a chain are now on different services, not hosts" in result.stdout
    assert nodes_by_chain(pods) == [{1, 2}] * 3
    refused = threefs(pods, "drain", "h9", status=2)
    assert "unknown node `h9`" in refused.stderr
    none_given = threefs(pods, "drain", status=2)
    assert "no node given" in none_given.stderr


def test_a_drain_without_progress_names_the_reason(pods: Pods) -> None:
    start(pods)
    pods.start("storage-3", "--host", "c")
    pods.wait_states(lambda states: set(states) == {1, 2, 3, 4})
    pods.stop("storage-0", signal.SIGKILL)
    pods.wait_states(lambda states: "SERVING" not in states[1])
    drained = threefs(pods, "drain", "3", "--apply", "--stalled-seconds", "2", status=1)
    assert "on node-1 is OFFLINE: a replica is moved only while the others serve" in drained.stderr
    assert "no progress for 2 s" in drained.stderr
    assert "moves remain" in drained.stdout
    shown = threefs(pods, "status").stdout
    assert "node-3 is drained: " in shown
    rebalance = threefs(pods, "rebalance").stdout
    assert "a replica is moved only while the others serve" in rebalance
    waiting = json.loads(threefs(pods, "rebalance", "-o", "json").stdout)["waiting"]
    assert {move["wait"]["cause"] for move in waiting} == {"replica"}
    # It ends when the other replica is back, with the same request.
    pods.start("storage-0", "--host", "a")
    assert "node-3: empty" in threefs(pods, "drain", "3", "--apply").stdout


def test_the_rate_of_moves_is_stored(pods: Pods) -> None:
    start(pods)
    shown = threefs(pods, "rebalance", "--rate", "64M").stdout
    assert "at most 64.0 MiB per second" in shown
    plan = json.loads(threefs(pods, "rebalance", "-o", "json").stdout)
    assert plan["bytes_per_second_max"] == 64 << 20
    pods.stop("mgmtd", signal.SIGKILL)
    pods.start("mgmtd")
    plan = json.loads(threefs(pods, "rebalance", "-o", "json").stdout)
    assert plan["bytes_per_second_max"] == 64 << 20
    assert "--rate is -1" in threefs(pods, "rebalance", "--rate=-1", status=2).stderr
