"""`hfreduce status` over running, stopped and killed ranks: which rank waits for which."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed as dist
from hfreduce import exposition, flight, status
from hfreduce.__main__ import main
from hfreduce.testing import Layout, run

pytestmark = pytest.mark.torch

LATE_RANK = 1
PATIENCE_SECONDS = 90
LONG_LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": str(PATIENCE_SECONDS)}


def wait_for_go_file(folder):
    """Delay the second allreduce of rank 1 until the file `go` exists."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not Path(folder, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def two_allreduces(rank, size, folder):
    import torch

    dist.all_reduce(torch.ones(10))
    if rank == LATE_RANK:
        wait_for_go_file(folder)
    dist.all_reduce(torch.ones(10))
    return "done"


@contextmanager
def running(folder, layout, lost_ranks=()):
    """Runs the ranks during the block; afterwards the yielded list has their outcomes."""
    with ThreadPoolExecutor(1) as pool:
        outcomes = []
        future = pool.submit(
            run, two_allreduces, layout, str(folder), lost_ranks=list(lost_ranks),
            timeout_seconds=PATIENCE_SECONDS,
            deadline_seconds=PATIENCE_SECONDS, environment=LONG_LIVENESS | directories(folder),
        )  # fmt: skip
        try:
            yield outcomes
        finally:
            (folder / "go").touch()
            outcomes += future.result()


def directories(folder):
    return {"HFREDUCE_RUN_DIR": str(folder / "run"), "HFREDUCE_DUMP_DIR": str(folder / "dumps")}


def wait_for_group(folder, accept, stuck_after_seconds=0.0):
    """The first group once `accept` is true for it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    groups = []
    while time.monotonic() < deadline:
        groups = status.groups(flight.find([folder / "run"]), stuck_after_seconds)
        if groups and accept(groups[0]):
            return groups[0]
        time.sleep(0.02)
    raise AssertionError([status.table(group) for group in groups])


def in_second_allreduce(group, waiting=2):
    # Sequence 0 is the rendezvous, 1 the first allreduce.
    waiting_ranks = [
        rank for rank in group.ranks if rank.sequence == 2 and rank.waits_for is not None
    ]
    return len(waiting_ranks) == waiting


def run_commands_of_the_page(group, run_dir):
    """Runs the commands of docs/operations/hung-jobs.md for a running job."""
    page = (Path(__file__).parents[3] / "docs/operations/hung-jobs.md").read_text()
    commands = re.findall(r"^hfreduce (status.*)$", page, re.MULTILINE)
    assert len(commands) >= 7
    for line in commands:
        line = line.replace("4711", str(group.ranks[0].pid)).replace(
            "default/gpt", shlex.quote(group.job)
        )
        words = shlex.split(line.partition(" >")[0], comments=True)
        command = [sys.executable, "-m", "hfreduce", *words]
        environment = {**os.environ, "HFREDUCE_RUN_DIR": str(run_dir)}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if "--watch" in words:
            assert process.stdout.readline(), process.stderr.read()
            process.terminate()
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        # Exit status 1: ranks have waited longer than the limit meanwhile.
        assert "--watch" in words or (process.returncode in (0, 1) and output), (line, errors)


def test_an_absent_rank_is_named_while_the_others_wait(tmp_path, capsys):
    with running(tmp_path, Layout.one_node(3)) as outcomes:
        group = wait_for_group(tmp_path, in_second_allreduce)
        assert re.fullmatch(
            r"rank 1 \(node a0, pid \d+\) has not entered allreduce\(10 × float32, sum\) #2 "
            r"for .* s; 2 ranks wait for it",
            group.conclusion,
        ), group.conclusion
        assert (group.verdict, group.culprits, group.world_size) == ("stuck", [LATE_RANK], 3)
        patient, impatient = ["--stuck-after", "3600"], ["--stuck-after", "0", "-o", "json"]
        where = ["--run-dir", str(tmp_path / "run")]
        assert main(["status", *where, *patient]) == 0
        output = capsys.readouterr().out
        assert "2 of 3 ranks here are in allreduce(10 × float32, sum) #2" in output
        assert "waiting for rank 1 to call it" in output
        by_process = ["--pid", str(group.ranks[0].pid)]
        assert main(["status", *where, *by_process, *impatient]) == 1
        [printed] = json.loads(capsys.readouterr().out)["groups"]
        assert [rank["rank"] for rank in printed["ranks"]] == [0, 1, 2]
        assert main(["status", *where, "--job", "another"]) == 3
        run_commands_of_the_page(group, tmp_path / "run")
    assert [outcome.value for outcome in outcomes] == ["done"] * 3
    assert list((tmp_path / "run").iterdir()) == [], "a clean end leaves no files"


def test_a_stopped_rank_is_reported_and_may_continue(tmp_path):
    with running(tmp_path, Layout.two_zones(2, 1)) as outcomes:
        group = wait_for_group(tmp_path, lambda group: in_second_allreduce(group, 3))
        pid = group.ranks[LATE_RANK].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            stopped = wait_for_group(tmp_path, lambda group: group.verdict == "stopped")
        finally:
            os.kill(pid, signal.SIGCONT)
        assert stopped.culprits == [LATE_RANK]
        assert re.search(r"^rank 1 .* is stopped for .*; 3 ranks wait$", stopped.conclusion)
        assert all(rank.seen == status.HERE for rank in stopped.ranks)
    assert [outcome.value for outcome in outcomes] == ["done"] * 4


def test_a_killed_rank_and_its_survivors_can_be_read_afterwards(tmp_path):
    with running(tmp_path, Layout.one_node(3), lost_ranks=[LATE_RANK]) as outcomes:
        group = wait_for_group(tmp_path, in_second_allreduce)
        os.kill(group.ranks[LATE_RANK].pid, signal.SIGKILL)
        dead = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not dead and time.monotonic() < deadline:
            recorders = flight.find([tmp_path / "run"])
            dead = [r for r in recorders if r.data["rank"] == LATE_RANK and r.life == "dead"]
        assert [entry["state"] for entry in dead[0].data["entries"]] == ["completed"] * 2
    assert main(["status", "--run-dir", str(tmp_path / "run")]) == 3, "the survivors have ended"
    assert main(["status", "--run-dir", str(tmp_path / "run"), "--ended"]) == 1
    for outcome in outcomes:
        if outcome.rank == LATE_RANK:
            continue
        assert outcome.failure is not None
        path = outcome.failure.fields["flight_record"]
        assert outcome.failure.text.endswith(f"; flight record: {path}")
        record = json.loads(Path(path).read_text())
        assert (record["format"], record["rank"]) == ("hfreduce-flight", outcome.rank)
        assert (record["cause"]["kind"], record["cause"]["peer"]) == ("peer_died", LATE_RANK)
        last = record["entries"][-1]
        assert (last["sequence"], last["state"], last["waiting_for"]) == (2, "started", LATE_RANK)


def test_status_without_running_ranks(tmp_path, capsys):
    (tmp_path / "stray.flight").write_bytes(b"something else")
    assert main(["status", "--run-dir", str(tmp_path)]) == 3
    assert "no running rank of HFReduce on this machine" in capsys.readouterr().out
    assert main(["status", "--pid", "4194304"]) == 2
    assert "process 4194304 does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["status", "--output", "xml"])
    assert ended.value.code == 2


# Recorders with fictitious contents.


def entry(
    sequence, *, state="started", called=0, kind="allreduce", text="allreduce(5 × float32, sum)"
):
    return {
        "sequence": sequence, "state": state, "called_ns": called, "finished_ns": called,
        "kind": kind, "operation": text, "fingerprint": text, "chunks": 4, "chunks_delivered": 1,
    }  # fmt: skip


def recorder(rank, entries, *, life="running", world=4, waits=None, peers=(), **more):
    waiting = None
    if waits is not None:
        sequence = entries[-1]["sequence"] if entries else None
        waiting = {"sequence": sequence, "phase": f"waiting for rank {waits}", "rank": waits}
    data = {
        "rank": rank, "group": "g", "job": "j", "epoch": 0, "world_size": world, "node": f"n{rank}",
        "host": "h", "reached_at": f"eth0 10.0.0.{rank}", "state": "open", "cause": None,
        "read_ns": 31_000_000_000, "created_ns": 0, "beat_ns": 31_000_000_000,
        "entries": entries, "waiting": waiting, "peers": list(peers),
    }  # fmt: skip
    return flight.Recorder(data | more, life, 100 + rank)


def only_group(recorders):
    [group] = status.groups(recorders, 5.0)
    return group


def test_a_rank_of_another_node_is_reported_by_its_neighbor():
    peer = {
        "rank": 3, "node": "b0", "link": True, "sequence": None, "waiting_for": None,
        "left": False, "heard_ns": 30_900_000_000,
    }  # fmt: skip
    group = only_group([
        recorder(0, [entry(812)], waits=1),
        recorder(1, [entry(812)], waits=3, peers=[peer]),
    ])  # fmt: skip
    assert group.culprits == [3]
    assert group.conclusion == (
        "2 ranks are in allreduce(5 × float32, sum) #812 for 31 s; 2 of them wait for "
        "rank 3 (node b0), last heard 0.1 s ago (heard by rank 1)"
    )
    assert [(rank.rank, rank.life) for rank in group.ranks][-1] == (3, "unknown")
    assert "heard 0.1 s ago" in status.table(group)
    assert "(1 on other machines, not heard here)" in status.table(group)
    assert "reached at: n0 eth0 10.0.0.0, n1 eth0 10.0.0.1\n" in status.table(group)
    group = only_group([recorder(0, [entry(812)], peers=[{**peer, "streams": 4}]), recorder(1, [])])
    assert [rank.streams for rank in group.ranks] == [4, 0, 0]
    assert "10.0.0.1; 4 TCP streams to each neighbor\n" in status.table(group)


def test_a_mismatch_is_reported_before_the_ranks_fail():
    group = only_group([
        recorder(0, [entry(7)]),
        recorder(1, [entry(7)]),
        recorder(2, [entry(7, text="broadcast(5 × float32, root 0)")]),
    ])  # fmt: skip
    assert (group.verdict, group.culprits) == ("mismatch", [2])
    assert "rank 2 (node n2, pid 102) called broadcast(5 × float32, root 0)" in group.conclusion


def test_an_absent_rank_is_named_at_the_start():
    group = only_group([recorder(rank, [], waits=3, state="connecting") for rank in range(3)])
    assert (group.verdict, group.culprits) == ("stuck", [3])
    assert group.conclusion == "3 ranks connect for 31 s; 3 ranks wait for rank 3"


def test_a_dead_rank_has_precedence_over_its_consequences():
    group = only_group(
        [
            recorder(0, [entry(9)], waits=1),
            recorder(1, [entry(8, state="completed")], life="dead"),
        ]
    )
    assert (group.verdict, group.culprits) == ("dead", [1])
    assert group.conclusion == "rank 1 (node n1, pid 101) is dead; 1 rank waits"


def test_a_moving_group_has_no_culprits_and_dead_groups_are_omitted():
    assert status.groups([recorder(0, [], life="dead")], 5.0) == []
    group = only_group([recorder(0, [entry(3, called=30_000_000_000)]), recorder(1, [])])
    assert (group.verdict, group.culprits) == ("moving", [])
    idle = only_group([recorder(0, [entry(3, state="completed", called=1_000_000_000)])])
    assert idle.conclusion == "no operation is under way for 30 s, after operation #3"


def test_a_cycle_of_waiting_ranks_is_reported():
    group = only_group([recorder(0, [entry(3)], waits=1), recorder(1, [entry(3)], waits=0)])
    assert group.verdict == "stuck"


def test_output_for_prometheus_and_for_the_trace_viewer():
    completed = entry(1, state="completed", called=2_000_000_000) | {"finished_ns": 5_000_000_000}
    pending = entry(2, called=6_000_000_000)
    recorders = [
        recorder(rank, [completed, pending], world=3, waits=1, operations=3) for rank in (0, 2)
    ]
    recorders.append(recorder(1, [completed], world=3, operations=2))
    [group] = status.groups(recorders, 5.0)
    lines = exposition.prometheus([group], recorders).splitlines()
    assert all(
        line.startswith(("# HELP hfreduce_", "# TYPE hfreduce_", "hfreduce_")) for line in lines
    )
    assert 'hfreduce_groups{verdict="stuck"} 1' in lines
    assert 'hfreduce_groups{verdict="idle"} 0' in lines
    assert 'hfreduce_ranks{life="running"} 3' in lines
    assert 'hfreduce_operations_total{group="g",rank="1"} 2' in lines
    assert 'hfreduce_operation_seconds{group="g",rank="2"} 25' in lines
    assert 'hfreduce_operation_seconds{group="g",rank="1"} 0' in lines
    assert [line for line in lines if line.startswith("hfreduce_culprit{")] == [
        'hfreduce_culprit{group="g",rank="1"} 1'
    ]
    events = json.loads(exposition.trace([group], recorders))["traceEvents"]
    complete_events = [event for event in events if event["ph"] == "X"]
    assert [(event["tid"], event["args"]["number"]) for event in complete_events] == [
        (0, 1), (0, 2), (2, 1), (2, 2), (1, 1),
    ]  # fmt: skip
    assert (complete_events[0]["ts"], complete_events[0]["dur"]) == (2e6, 3e6)
    assert (complete_events[1]["ts"], complete_events[1]["dur"]) == (6e6, 25e6), "until it was read"


def test_these_outputs_work_without_running_ranks(tmp_path, capsys):
    where = ["--run-dir", str(tmp_path)]
    assert main(["status", *where, "-o", "prometheus"]) == 3
    assert 'hfreduce_ranks{life="running"} 0' in capsys.readouterr().out
    assert main(["status", *where, "-o", "trace"]) == 3
    assert json.loads(capsys.readouterr().out)["traceEvents"] == []
