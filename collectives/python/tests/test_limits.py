"""Pods have 64 MiB of /dev/shm and may lock 8 MiB: neither is needed."""

import ctypes
import gc
import os
import re
import resource
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import hfreduce.torch
import pytest
import torch
import torch.distributed as dist
from hfreduce._native import Membership, Settings
from hfreduce.backend import HFReduceBackend
from hfreduce.testing import Layout, run, values

pytestmark = pytest.mark.torch

CLONE_NEWNS = 0x00020000
SETTLE_SECONDS = 60.0
MS_PRIVATE_RECURSIVE = 0x40000 | 0x4000


def full_shm(rank, size, store):
    """A private, full /dev/shm of one page, no locked memory; then a group and sums of 64 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return "not allowed"
    libc.mount(b"none", b"/", None, MS_PRIVATE_RECURSIVE, None)
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=4096") != 0:
        return "not allowed"
    Path("/dev/shm/full").write_bytes(b"x" * 4096)
    with pytest.raises(OSError, match="No space"):
        Path("/dev/shm/more").write_bytes(b"x")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    dist.init_process_group("hfreduce", init_method=f"file://{store}", rank=rank, world_size=size)
    for tensor in (torch.ones(16 << 20), hfreduce.torch.empty(16 << 20).fill_(1)):
        dist.all_reduce(tensor)
        assert tensor.eq(size).all()
    # Limits do not apply to root, so the locked memory is read.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    assert re.search(r"^VmLck:\s+0 kB$", status, re.MULTILINE), status
    return True


def test_neither_dev_shm_nor_locked_memory_is_needed(tmp_path):
    outcomes = run(full_shm, Layout.one_node(3), str(tmp_path / "store"), backend=None)
    if any(outcome.value == "not allowed" for outcome in outcomes):
        pytest.skip("mount namespaces are not allowed here")
    assert [outcome.value for outcome in outcomes] == [True] * 3, outcomes


def few_descriptors(rank, size, store, more, room):
    """A soft limit of `more` further descriptors, a hard one of `room`; then a group."""
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + more, opened + room))
    dist.init_process_group("hfreduce", init_method=f"file://{store}", rank=rank, world_size=size)
    inputs, received = torch.full((size,), float(rank)), torch.empty(size)
    dist.all_to_all_single(received, inputs)
    assert received.tolist() == list(range(size))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - opened


def test_a_low_soft_limit_of_descriptors_is_raised(tmp_path):
    store = str(tmp_path / "store")
    raised = values(run(few_descriptors, Layout.one_node(4), store, 3, 500, backend=None))
    assert all(32 < more <= 500 for more in raised), raised


def test_a_low_hard_limit_of_descriptors_is_named_with_the_remedy(tmp_path):
    store = str(tmp_path / "store")
    for outcome in run(few_descriptors, Layout.one_node(2), store, 10, 20, backend=None):
        failure = outcome.failure
        assert failure.fields["kind"] == "io", failure
        for part in ("a group of 2 ranks needs", "hard limit is", "ulimit -n", "LimitNOFILE"):
            assert part in failure.text, failure


def few_descriptors_alone(_rank, _size):
    """A process that may open 10 more descriptors joins a group without any other rank."""
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 10, opened + 10))
    settings = Settings.read({})
    members = Membership(0, (0, 1), 2)
    HFReduceBackend.join(dist.HashStore(), members, settings, timedelta(seconds=3))


def test_a_low_hard_limit_of_descriptors_is_named_before_any_connection():
    outcomes = run(few_descriptors_alone, Layout.one_node(1), backend=None)
    failure = outcomes[0].failure
    assert failure.fields["kind"] == "io", failure
    assert "a group of 2 ranks needs" in failure.text, failure
    assert socket.gethostname() in failure.text, failure


def resources():
    """Descriptors, threads and shared segments of this process."""
    counts = [len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("fd", "task")]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return [*counts, maps.count("memfd:hfreduce")]


def settled(limit):
    """The resources once none is over its limit: a thread ends a moment after its group, and
    its resources with it. Leaked resources stay over the limit until the deadline."""
    until = time.monotonic() + SETTLE_SECONDS
    while True:
        gc.collect()
        counts = resources()
        within = all(count <= most for count, most in zip(counts, limit, strict=True))
        if within or time.monotonic() >= until:
            return counts
        time.sleep(0.01)


def many_groups(rank, size):
    """Groups that are created and destroyed leave no descriptors and threads."""

    def cycle():
        group = dist.new_group(list(range(size)))
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
        dist.destroy_process_group(group)

    for _ in range(3):
        cycle()
    limit = [count + more for count, more in zip(resources(), (2, 1, 0), strict=True)]
    for _ in range(20):
        cycle()
    return limit, settled(limit)


def dropped_groups(rank, size):
    """Groups that are dropped without a shutdown release their descriptors, too."""
    store = dist.distributed_c10d._get_default_store()
    limit = [count + more for count, more in zip(resources(), (2, 1, 0), strict=True)]
    for number in range(5):
        group = dist.ProcessGroup(dist.PrefixStore(f"unheld-{number}", store), rank, size)
        membership = Membership(rank, tuple(range(size)), size)
        backend = HFReduceBackend.join(
            dist.PrefixStore(f"dropped-{number}", store), membership,
            Settings.read(os.environ), timedelta(seconds=60),
        )  # fmt: skip
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        del backend
        gc.collect()
        tensor = torch.ones(1000)
        future = group.allreduce([tensor], dist.AllreduceOptions()).get_future()
        assert future.wait()[0].eq(size).all()
        message = torch.ones(10)
        if rank == 0:
            group.send([message], 1, 0).wait()
        elif rank == 1:
            group.recv([message], 0, 0).wait()
        group.barrier(dist.BarrierOptions()).wait()
        del group, future
    return limit, settled(limit)


@pytest.mark.parametrize("function", [many_groups, dropped_groups])
@pytest.mark.parametrize("layout", [Layout.two_zones(2, 1), Layout.one_node(3)], ids=["tcp", "shm"])
def test_groups_leave_nothing_behind(function, layout):
    for limit, final in values(run(function, layout)):
        assert all(count <= most for count, most in zip(final, limit, strict=True)), (limit, final)


def test_the_import_loads_little_and_no_other_library():
    program = "import hfreduce, sys; print(*sys.modules); hfreduce.allreduce; hfreduce.Place"
    command = [sys.executable, "-I", "-c", program]
    loaded = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert "hfreduce._native" in loaded
    assert not loaded & {"torch", "numpy", "ctypes", "dataclasses", "inspect", "json", "typing"}
