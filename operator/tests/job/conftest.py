"""Fixtures: pods of small scripts, and checks for their remaining processes."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from flyer.job.fork_server import ForkServer
from flyer.job.pod import PodSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
def make_pod(tmp_path: Path) -> Callable[..., PodSpec]:
    """`make_pod(script_text, node_rank=0, **fields)`: a pod that runs the script."""

    def make(script: str = "", **fields: Any) -> PodSpec:
        node_rank = fields.get("node_rank", 0)
        path = tmp_path / f"script-{node_rank}.py"
        path.write_text(textwrap.dedent(script))
        defaults: dict[str, Any] = {
            "job": "gpt",
            "chain": "c1",
            "node": f"a{node_rank}",
            "zone": "A",
            "master_port": 29400,
            "command": ["python", str(path)],
            "log_dir": str(tmp_path / "log"),
            "run_dir": str(tmp_path / f"run-{node_rank}"),
        }
        return PodSpec(**{**defaults, **fields})

    return make


@pytest.fixture
async def fork_server(tmp_path: Path) -> AsyncIterator[ForkServer]:
    with (tmp_path / "fork-server.log").open("wb") as log:
        started = await ForkServer.start(log=log)
        try:
            yield started
        finally:
            await started.close()


@pytest.fixture
def watch() -> SimpleNamespace:
    """Observes processes and files of pods."""
    return SimpleNamespace(log_of=_log_of, appears=_appears, alive=_alive, gone=_have_exited)


def _log_of(spec: PodSpec, rank: int) -> str:
    return Path(spec.log_dir, f"rank-{rank:04d}.log").read_text()


async def _appears(path: Path, seconds: float = 60.0) -> str:
    """Wait for a file and return its text; scripts signal progress with files."""
    async with asyncio.timeout(seconds):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.005)
    return path.read_text()


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False


def _have_exited(pids: list[int], seconds: float = 60.0) -> bool:
    """Whether all these processes end by themselves in time."""
    deadline = time.monotonic() + seconds
    while any(_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
