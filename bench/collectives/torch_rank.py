"""A rank with torch: all_reduce of HFReduce and of Gloo, in the same process, as it is ordered."""

from __future__ import annotations

import contextlib
import socket
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import hfreduce.torch
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from typing import TextIO

__all__ = ["rank_main"]


def rank_main(rank: int, size: int, path: str, names: dict[str, str]) -> None:
    """Serves one line a backend; `names` has the crew of each. Ends when the lines do."""
    groups = {
        "hfreduce": dist.group.WORLD,
        "gloo": dist.new_group(backend="gloo") if "gloo" in names else None,
    }
    lines: dict[int, tuple[socket.socket, TextIO, Any]] = {}
    for backend, name in names.items():
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(path)
        line.sendall(f"{name} {rank}\n".encode())
        lines[line.fileno()] = (line, line.makefile("r"), groups[backend])
    memory: dict[str, torch.Tensor] = {}
    while True:
        for ready in wait(list(lines)):
            assert isinstance(ready, int)
            line, file, group = lines[ready]
            order = file.readline().split()
            if not order:
                return
            # The stage may have closed, for a crew that failed.
            with contextlib.suppress(BrokenPipeError):
                line.sendall(f"{obey(order, group, size, memory)}\n".encode())


def obey(order: list[str], group: Any, size: int, memory: dict[str, torch.Tensor]) -> str:
    """One order; its answer."""
    kind, size_bytes, where, count, check = order
    dtype: torch.dtype = getattr(torch, kind)
    if where not in memory:
        try:
            memory[where] = allocated(where, group)
        except LookupError:
            return "no such memory"
    tensor = memory[where][: int(size_bytes)].view(dtype)
    tensor.fill_(int(check))
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(int(count)):
        dist.all_reduce(tensor, group=group)
    seconds = time.perf_counter() - start
    if int(check) and not bool(tensor.eq(size).all()):
        return "no right result"
    return f"ok {seconds:.9f}"


BYTES_MAX = 64 << 20


def allocated(where: str, group: Any) -> torch.Tensor:
    """Memory of this kind for the largest case."""
    if where == "private":
        return torch.empty(BYTES_MAX, dtype=torch.uint8)
    if dist.get_backend(group) != "hfreduce":
        raise LookupError(where)
    return hfreduce.torch.empty(BYTES_MAX, dtype=torch.uint8, group=group)
