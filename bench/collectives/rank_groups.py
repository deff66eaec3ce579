"""Rank groups: starts and ends the ranks of each implementation as local processes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from hfreduce.testing import Layout, run

from bench.collectives import torch_rank
from bench.collectives.harness import BenchError, Harness, RankGroup
from bench.collectives.peers import COMMANDS
from bench.report import OUTPUT, ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.collectives.peers import Launch

__all__ = ["RankGroups", "compiled"]

HERE: Final = Path(__file__).resolve().parent / "native"
HEADER: Final = ROOT / "collectives/crates/hfreduce-c/include"
BUILD: Final = OUTPUT / "native"
COMPILE_SECONDS: Final = 60
GROUP_SECONDS: Final = 3600.0
LIVENESS_SECONDS: Final = "60"
"""Peers that spin may delay HFReduce's heartbeats."""


def compiled(name: str) -> Path | None:
    """A program of `native/`, compiled; None where its compiler is missing."""
    BUILD.mkdir(parents=True, exist_ok=True)
    output = BUILD / name
    if name == "hfreduce":
        library = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
        words = ["cc", f"-I{HEADER}", f"-L{library}", f"-Wl,-rpath,{library}"]
        source, libraries = HERE / "hfreduce.c", ["-lhfreduce"]
    else:
        words, source, libraries = [f"mpicc.{name}"], HERE / "mpi.c", []
    if shutil.which(words[0]) is None or (
        name in COMMANDS and shutil.which(COMMANDS[name]) is None
    ):
        return None
    words += ["-std=gnu11", "-O3", "-march=native", "-o", str(output), str(source), *libraries]
    result = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=COMPILE_SECONDS
    )
    if result.returncode:
        raise BenchError(f"{' '.join(words)}: {result.stderr.strip()}")
    return output


@dataclass(slots=True)
class RankGroups:
    """The rank groups of one layout; the end of the context ends all their processes."""

    harness: Harness
    layout: Layout
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.harness.__exit__()
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                # mpirun and its child processes.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for thread in self._threads:
            thread.join(timeout=60)

    def with_torch(self, names: dict[str, str]) -> list[RankGroup]:
        """HFReduce and Gloo under torch: a group for each backend, in the same processes."""

        def body() -> None:
            outcomes = run(
                torch_rank.rank_main, self.layout, str(self.harness.path), names,
                timeout_seconds=120, deadline_seconds=GROUP_SECONDS,
                environment={"HFREDUCE_LIVENESS_SECONDS": LIVENESS_SECONDS} | self.environment,
            )  # fmt: skip
            bad = [
                f"rank {outcome.rank}: {outcome.failure}" for outcome in outcomes if outcome.failure
            ]
            self._failures.extend(bad)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self._threads.append(thread)
        ranks = self.layout.world_size

        def ended() -> str | None:
            return None if thread.is_alive() else "; ".join(self._failures) or "has ended"

        return [self.harness.gather(name, ranks, ended) for name in names.values()]

    def native(self, name: str = "native") -> RankGroup:
        """HFReduce in C."""
        program = compiled("hfreduce")
        if program is None:
            raise BenchError("no C compiler: install gcc")
        folder = self.folder / name
        folder.mkdir()
        (folder / "key").write_text(secrets.token_hex(32), encoding="ascii")
        (folder / "topology.json").write_text(json.dumps(self.layout.document()), encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        common = os.environ | {
            "WORLD_SIZE": str(self.layout.world_size),
            "FLYER_TOPOLOGY": str(folder / "topology.json"),
            "HFREDUCE_RENDEZVOUS": f"127.0.0.1:{port}",
            "HFREDUCE_KEY_FILE": str(folder / "key"),
            "HFREDUCE_RUN_DIR": str(folder),
            "HFREDUCE_DUMP_DIR": str(folder),
            "HFREDUCE_LIVENESS_SECONDS": LIVENESS_SECONDS,
        }
        started = [
            self._start([str(program), str(self.harness.path), name], {**common, "RANK": str(rank)})
            for rank in range(self.layout.world_size)
        ]
        return self.harness.gather(name, self.layout.world_size, lambda: _ended(started))

    def mpi(self, launch: Launch) -> RankGroup | None:
        """The ranks of one MPI configuration; None where the library is not installed."""
        program = compiled(launch.peer)
        if program is None:
            return None
        ranks = self.layout.world_size
        words = [
            *launch.words,
            "-n",
            str(ranks),
            str(program),
            str(self.harness.path),
            launch.group,
        ]
        started = [self._start(words, os.environ | dict(launch.environment))]
        return self.harness.gather(launch.group, ranks, lambda: _ended(started))

    def _start(
        self, words: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            words, env={**environment, **self.environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process


def _ended(processes: Sequence[subprocess.Popen[bytes]]) -> str | None:
    codes = [process.poll() for process in processes]
    bad = next((code for code in codes if code is not None), None)
    return None if bad is None else f"ended with status {bad}"
