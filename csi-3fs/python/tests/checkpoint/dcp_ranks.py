"""Ranks of a DCP job as processes with gloo; a fork server that imports torch once.

`python dcp_ranks.py` reads one JSON object a line, forks the ranks that it describes, and writes
their exit statuses and results. A rank with `kill` in its orders kills itself at a change of files.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import threefs
import torch

# Optimizers import it at their first step: seconds in each forked rank.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from threefs.checkpoint import LocalFiles
from threefs.checkpoint.distributed import ThreeFSReader, ThreeFSWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

GROUP_SECONDS = 60
CHANGES = ("mkdir", "batch_write", "write_file", "rename", "rmtree")


class DyingFiles:
    """Kills its process at its n-th change: before it, or after half of a write."""

    def __init__(self, files: Any, change: int) -> None:
        self._files = files
        self._remaining = change

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._files, name)
        if name not in CHANGES:
            return function

        def changing(*args: Any, **options: Any) -> Any:
            if self._remaining == 0:
                if name == "batch_write":
                    self._files.batch_write([(p, at, d[: len(d) // 2]) for p, at, d in args[0]])
                elif name == "write_file":
                    path, data = args
                    self._files.batch_write([(path, 0, data[: len(data) // 2])])
                os.kill(os.getpid(), signal.SIGKILL)
            self._remaining -= 1
            return function(*args, **options)

        return changing


def open_files(orders: dict[str, Any]) -> Any:
    storage = orders["storage"]
    files = LocalFiles(storage) if Path(storage).is_dir() else threefs.connect(storage)
    kill = orders.get("kill")
    if kill is not None and kill["rank"] == dist.get_rank():
        return DyingFiles(files, kill["change"])
    return files


def tensor_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_state(seed: int) -> dict[str, Any]:
    """FSDP2 and optimizer state, tensors sharded in each dimension, and what is not sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(33, 57), torch.nn.Linear(57, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(tensor_of(seed, 4, 33)).square().mean().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "rows": distribute_tensor(tensor_of(seed, 701, 1100), mesh, [Shard(0)]),
        "columns": distribute_tensor(tensor_of(seed + 1, 301, 901), mesh, [Shard(1)]),
        "few": distribute_tensor(tensor_of(seed + 2, 2, 3), mesh, [Shard(0)]),
        "replicated": distribute_tensor(tensor_of(seed + 3, 50), mesh, [Replicate()]),
        "plain": tensor_of(seed + 4, 40, 30).T,
        "half": tensor_of(seed + 5, 1000).to(torch.bfloat16),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "step": seed,
        "words": {"name": f"run {seed}", "list": [seed, None]},
    }


def digest(state: Any) -> str:
    """Of the global tensors: equal on any number of ranks."""
    fingerprint = hashlib.sha256()

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                add(f"{path}/{key}", value[key])
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            data = whole.detach().contiguous().reshape(-1).view(torch.uint8)
            fingerprint.update(f"{path} {whole.dtype} {tuple(whole.shape)}".encode())
            fingerprint.update(ctypes.string_at(data.data_ptr(), data.numel()))
        else:
            fingerprint.update(f"{path} {value!r}".encode())

    add("", state)
    return fingerprint.hexdigest()


def save(orders: dict[str, Any]) -> str:
    state = make_state(orders["seed"])
    writer = ThreeFSWriter(open_files(orders))
    checkpoint_id = orders["id"]
    if orders.get("different_ids"):
        checkpoint_id += str(dist.get_rank())
    dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
    return digest(state)


def async_saves(orders: dict[str, Any]) -> list[str]:
    """Three saves by one writer; the state changes right after each call, as in training."""
    state = make_state(orders["seed"])
    executor = AsyncCheckpointerType(orders["executor"])
    files = open_files(orders)
    if executor is AsyncCheckpointerType.PROCESS and not isinstance(files, LocalFiles):
        files = orders["storage"]
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    writer = ThreeFSWriter(files)
    digests = []
    for number in range(3):
        digests.append(digest(state))
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        future = dcp.async_save(
            state,
            checkpoint_id=f"{orders['id']}-{number}",
            storage_writer=writer,
            planner=planner,
            async_checkpointer_type=executor,
        )
        with torch.no_grad():
            for name in ("rows", "columns", "plain"):
                state[name].add_(1)
        # Collectives of `digest` must not mix with those of the save.
        future.result()
    return digests


def load(orders: dict[str, Any]) -> list[str]:
    reader = ThreeFSReader(open_files(orders))
    digests = []
    for checkpoint_id in orders["ids"]:
        state = make_state(1000)
        dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=reader)
        digests.append(digest(state))
    return digests


def resume(orders: dict[str, Any]) -> str:
    """Load, and save another state with the same id."""
    (loaded,) = load({**orders, "ids": [orders["id"]], "kill": None})
    Path(orders["results"], f"{dist.get_rank()}.loaded").write_text(loaded)
    return save(orders)


SCENARIOS = {"save": save, "async_saves": async_saves, "load": load, "resume": resume}


def run_rank(rank: int, orders: dict[str, Any], results: Path) -> int:
    store = f"file://{results}/store"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=rank,
        world_size=orders["world_size"],
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    try:
        result = {"result": SCENARIOS[orders["scenario"]](orders)}
    except BaseException as error:  # DCP's own exception is not an Exception
        result = {"error": f"{type(error).__name__}: {error}"}
    (results / f"{rank}.json").write_text(json.dumps(result))
    return 1 if "error" in result else 0


def fork_rank(rank: int, orders: dict[str, Any], results: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 2
        try:
            status = run_rank(rank, orders, results)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def wait_all(pids: list[int], seconds: float) -> list[int]:
    """Exit statuses; processes that run longer are killed."""
    timer = threading.Timer(seconds, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    timer.start()
    started = time.monotonic()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    timer.cancel()
    timer.join()
    if time.monotonic() - started > seconds:
        return [-signal.SIGALRM for _ in pids]
    return statuses


def main() -> None:
    for line in sys.stdin:
        orders = json.loads(line)
        results = Path(orders["results"])
        ranks = range(orders["world_size"])
        statuses = wait_all(
            [fork_rank(rank, orders, results) for rank in ranks], GROUP_SECONDS + 20
        )
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
