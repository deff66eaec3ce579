"""Pods have 64 MiB of /dev/shm and may lock 8 MiB: neither is needed."""

import ctypes
import re
import resource
import subprocess
import sys
from pathlib import Path

import hfreduce.settings
import hfreduce.torch
import pytest
import torch
import torch.distributed as dist
from hfreduce.testing import Layout, run

pytestmark = pytest.mark.torch

CLONE_NEWNS = 0x00020000
MS_PRIVATE_RECURSIVE = 0x40000 | 0x4000


def full_shm(rank, size, store):
    """A private /dev/shm of one page, full, nothing to lock; then a group and sums of 64 MiB."""
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
    # Limits do not bind root, so that it locks nothing is looked up.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    assert re.search(r"^VmLck:\s+0 kB$", status, re.MULTILINE), status
    return True


def test_neither_dev_shm_nor_locked_memory_is_needed(tmp_path):
    outcomes = run(full_shm, Layout.one_node(3), str(tmp_path / "store"), backend=None)
    if any(outcome.value == "not allowed" for outcome in outcomes):
        pytest.skip("mount namespaces are not allowed here")
    assert [outcome.value for outcome in outcomes] == [True] * 3, outcomes


def test_the_page_lists_every_setting():
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs/concepts/collectives.md").read_text(encoding="utf-8")
    assert [name for name in hfreduce.settings.NAMES if f"`{name}`" not in page] == []


def many_groups(rank, size):
    """Groups that are made and dismantled leave no descriptor and no thread behind."""

    def resources():
        return [len(list(Path(f"/proc/self/{name}").iterdir())) for name in ("fd", "task")]

    def cycle():
        group = dist.new_group(list(range(size)))
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
        dist.destroy_process_group(group)

    for _ in range(3):
        cycle()
    before = resources()
    for _ in range(20):
        cycle()
    return before, resources()


def test_groups_leave_nothing_behind():
    for outcome in run(many_groups, Layout.two_zones(2, 1)):
        assert outcome.failure is None, outcome
        (files, threads), (files_after, threads_after) = outcome.value
        assert files_after <= files + 2
        assert threads_after <= threads + 1


def test_the_import_loads_little_and_no_other_library():
    program = "import hfreduce, sys; print(*sys.modules); hfreduce.allreduce; hfreduce.Place"
    words = [sys.executable, "-I", "-c", program]
    loaded = set(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split())
    assert "hfreduce._native" in loaded
    assert not loaded & {"torch", "numpy", "ctypes", "dataclasses", "inspect", "json", "typing"}
