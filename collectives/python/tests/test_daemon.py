"""hfreduced: results equal those without it; failures name a rank and stay in one group."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import hfreduce
import hfreduce.torch
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hfreduce import CollectiveError, _native
from hfreduce.testing import Layout, run, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300, func_only=True)]

NODES = Layout.two_zones(1, 2)
LIVENESS = {"HFREDUCE_LIVENESS_SECONDS": "6"}  # longer than a busy machine keeps a rank off
LOST_RANK = 1
PATIENCE_SECONDS = 110
PROMPT_SECONDS = 60
"""Allows for a busy machine, but far below the timeout of `PATIENCE_SECONDS`."""


def by_node(first, second):
    """The daemons of a two-node layout of two ranks each."""
    return {rank: (first, first, second, second)[rank].environment for rank in range(4)}


def train(rank, size):
    """Three steps of a small network, as a digest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 10))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(16, 64, generator=data)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def digests(**options):
    outcomes = run(train, NODES, deadline_seconds=PATIENCE_SECONDS, **options)
    assert all(outcome.failure is None and outcome.answered for outcome in outcomes), outcomes
    return {outcome.value for outcome in outcomes}


def test_training_through_daemons_is_bit_identical_to_threads(daemons):
    first, second = daemons(), daemons()
    served = digests(per_rank=by_node(first, second))
    mixed = digests(per_rank={1: first.environment, 2: second.environment})
    assert len(served | mixed | digests()) == 1


def reduce_with_a_signal(rank, size, number, pid):
    """Rank 1 or the process `pid` gets a signal in the middle of a long operation."""
    dist.all_reduce(torch.ones(10))
    tensor = torch.ones(4_000_000)
    if rank == LOST_RANK:
        threading.Timer(0.1, os.kill, (pid or os.getpid(), number)).start()
    for _ in range(100_000):
        dist.all_reduce(tensor)
        tensor.fill_(1)
    return "continued"


def failures(daemon_of, number, pid=0, lost_ranks=()):
    outcomes = run(
        reduce_with_a_signal, NODES, int(number), pid, environment=LIVENESS, per_rank=daemon_of,
        lost_ranks=lost_ranks,
        timeout_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    survivors = [outcome for outcome in outcomes if outcome.rank not in lost_ranks]
    for outcome in survivors:
        assert outcome.failure is not None, f"rank {outcome.rank} has no failure: {outcome}"
        assert outcome.failure.type == "CollectiveError", outcome
        assert outcome.seconds < PROMPT_SECONDS, outcome
    return [outcome.failure for outcome in survivors]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_is_named_and_the_daemon_serves_the_next_group(number, daemons):
    first, second = daemons(), daemons()
    for failure in failures(by_node(first, second), number, lost_ranks=[LOST_RANK]):
        assert failure.fields["peer"] == LOST_RANK, failure
        assert failure.fields["peer_node"] == "a0", failure
        assert failure.fields["kind"] == (
            "peer_died" if number == signal.SIGKILL else "peer_stalled"
        )
    assert len(digests(per_rank=by_node(first, second))) == 1
    assert (first.process.poll(), second.process.poll()) == (None, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_daemon_is_named_by_every_rank(number, daemons):
    first, second = daemons(), daemons()
    for failure in failures(by_node(first, second), number, first.pid):
        assert "hfreduced" in failure.text, failure
        assert failure.fields["peer_node"] == "a0", failure
        assert failure.fields["peer"] in (0, 1), failure


def leave_a_child(rank, size):
    """Rank 1 is killed; its child, like a data loader's, still has all its descriptors."""
    dist.all_reduce(torch.ones(10))
    if rank == LOST_RANK:
        if os.fork() == 0:
            time.sleep(PATIENCE_SECONDS)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_a_death_is_detected_across_pid_namespaces_while_a_child_keeps_the_socket(daemons):
    """As in a pod, where each container has its own processes."""
    daemon = daemons("unshare", "--pid", "--fork", "--kill-child")
    outcomes = run(
        leave_a_child, Layout.one_node(2), environment=daemon.environment, lost_ranks=[LOST_RANK],
        timeout_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    failure = outcomes[0].failure
    assert failure is not None
    assert (failure.fields["kind"], failure.fields["peer"]) == ("peer_died", LOST_RANK), failure


def reduce_ranks(communicator):
    """Sum of rank + 1 over all ranks, checked on every rank."""
    array = np.full(50_000, communicator.rank + 1, np.float32)
    hfreduce.allreduce(array, communicator)
    assert (array == array[0]).all()
    return float(array[0])


def reduce_until_it_fails():
    dist.all_reduce(torch.ones(10))
    for _ in range(10_000):
        dist.all_reduce(torch.ones(100_000))


def error_of_broken_group(rank, pid, number):
    """The error of a group in which rank 1 gets a signal, after the process `pid` was killed."""
    communicator = hfreduce.torch.communicator()
    if rank == LOST_RANK:
        dist.all_reduce(torch.ones(10))  # the others may not have its result yet
        if pid:
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), number)
    with pytest.raises(CollectiveError) as failed:
        reduce_until_it_fails()
    return communicator, failed.value


def continues(rank, size, number):
    communicator, error = error_of_broken_group(rank, 0, number)
    assert error.peer == LOST_RANK
    survivors = [member for member in range(size) if member != LOST_RANK]
    following = communicator.reconfigure(survivors, 50.0)
    assert (following.epoch, following.rank) == (1, survivors.index(rank))
    epochs, completed = zip(*following.came_from, strict=True)
    assert epochs == (0,) * len(survivors)
    assert completed[following.rank] == communicator.completed == error.sequence
    assert max(completed) - min(completed) <= 1
    result = reduce_ranks(following)
    following.close()
    return result


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("mixed", [False, True], ids=["served", "mixed"])
def test_survivors_continue_through_their_daemons(number, mixed, daemons):
    first, second = daemons(), daemons()
    served = by_node(first, second)
    if mixed:
        del served[2]
    outcomes = run(
        continues, NODES, int(number), environment=LIVENESS, per_rank=served,
        lost_ranks=[LOST_RANK], timeout_seconds=PATIENCE_SECONDS, deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    assert [outcome.value for outcome in outcomes if outcome.rank != LOST_RANK] == [6.0] * 3, (
        outcomes
    )
    assert (first.process.poll(), second.process.poll()) == (None, None)


def continues_without_the_daemon(rank, size, pid):
    """The daemon of ranks 0 and 1 is killed, and rank 1 with it."""
    communicator, error = error_of_broken_group(rank, pid, signal.SIGKILL)
    assert "hfreduced" in str(error)
    if rank == 0:
        with pytest.raises(CollectiveError, match="as a newcomer") as excinfo:
            communicator.reconfigure([0, 2, 3], 50.0)
        assert "hfreduced (process" in str(excinfo.value)
        assert (excinfo.value.kind, excinfo.value.peer) == ("peer_died", 0)
        return None
    # A rank that the daemon served can no longer be called, and is reported.
    with pytest.raises(CollectiveError) as absent:
        communicator.reconfigure([2, 0, 3], 50.0)
    assert absent.value.peer == 0
    return reduce_ranks(communicator.reconfigure([2, 3], 50.0))


def test_a_daemon_that_is_killed_with_a_rank_names_itself(daemons):
    first, second = daemons(), daemons()
    outcomes = run(
        continues_without_the_daemon, NODES, first.pid, environment=LIVENESS,
        per_rank=by_node(first, second), lost_ranks=[LOST_RANK], timeout_seconds=PATIENCE_SECONDS,
        deadline_seconds=PATIENCE_SECONDS,
    )  # fmt: skip
    assert values([outcomes[0], *outcomes[2:]]) == [None, 3.0, 3.0]


def test_a_newcomer_joins_through_its_daemon(daemons):
    key = b"k" * 32
    first, second = str(daemons().path), str(daemons().path)
    newcomer = _native.Newcomer("c", "A", key, daemon=second)
    alone = _native.Endpoint(0, 1, [("a", "A")], key, daemon=first)
    communicator = alone.connect([alone.info()], 30.0)
    results = []

    def join():
        results.append(reduce_ranks(newcomer.join(60.0)))

    thread = threading.Thread(target=join)
    thread.start()
    following = communicator.reconfigure([0, newcomer.info()], 60.0)
    results.append(reduce_ranks(following))
    thread.join(60.0)
    assert results == [3.0, 3.0]
    assert (following.epoch, following.came_from) == (1, [(0, 1), None])


def test_a_daemon_that_runs_out_of_descriptors_continues(daemons):
    most = 160
    daemon = daemons("prlimit", f"--nofile={most}:{most}")
    folder = Path(f"/proc/{daemon.pid}/fd")
    silent = []
    for _ in range(most):
        silent.append(socket.socket(socket.AF_UNIX))
        silent[-1].setblocking(False)
        if silent[-1].connect_ex(str(daemon.path)):
            break  # the kernel's queue of connections is full
    until = time.monotonic() + PROMPT_SECONDS
    while daemon.process.poll() is None and len(list(folder.iterdir())) < most - 1:
        assert time.monotonic() < until, "the daemon never ran out of descriptors"
        time.sleep(0.01)
    for client in silent:
        client.close()
    # New connections are served again: one that sends garbage is closed.
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PROMPT_SECONDS)
        client.connect(str(daemon.path))
        client.sendall(b"\xff" * 4)
        assert client.recv(1) == b""
    assert daemon.end() == 0


def test_the_program_prints_its_usage_and_ends_in_order(tmp_path, daemons):
    def ask(*arguments):
        command = [sys.executable, "-m", "hfreduce.daemon", *arguments]
        environment = {k: v for k, v in os.environ.items() if k != "HFREDUCE_DAEMON"}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=environment
        )

    assert "examples:" in ask("--help").stdout
    assert ask().returncode == 2
    assert ask("--socket", "x", "--mode", "9").returncode == 2
    assert "folder" in ask("--socket", str(tmp_path / "no" / "x")).stderr
    daemon = daemons()
    result = ask("--socket", str(daemon.path))
    assert result.returncode == 1
    assert "another hfreduced is listening" in result.stderr
    assert daemon.path.stat().st_mode & 0o777 == 0o600
    assert daemon.end() == 0
    assert not daemon.path.exists()
    # The socket of a killed daemon is replaced.
    dead = daemons()
    assert dead.end(signal.SIGKILL) == -signal.SIGKILL
    assert dead.path.exists()
    again = daemons(path=dead.path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(dead.path))
    assert again.end() == 0
