"""3FS and the driver on this machine, for the demo and the random kills."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import flyer.client
import threefs

from demo.observer import DemoError, Observer
from demo.processes import Process, wait_for_file

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "gpt" / "flyerjob.yaml"
URGENT = ROOT / "examples" / "gpt" / "urgent.yaml"
CLUSTER = ROOT / "examples" / "clusters" / "two-zones.yaml"
STORAGE_SERVICES = ("storage-1", "storage-2", "storage-3")

START_SECONDS = 60.0


class Stack:
    """One 3FS with three replicas, one driver; everything ends with the `with` block."""

    files: threefs.Client
    client: flyer.client.Client
    observer: Observer

    def __init__(self, folder: Path, restart_after_seconds: float) -> None:
        self.folder = folder
        self.cluster_file = folder / "3fs" / "cluster.json"
        self._restart_after_seconds = restart_after_seconds
        self._stack = ExitStack()
        self._storage: Process | None = None
        self._driver: Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_storage(self) -> None:
        """Starts mgmtd, meta and three storage services and connects to them."""
        command = ["threefs", "serve", "--data", str(self.cluster_file.parent)]
        command += ["--storage", str(len(STORAGE_SERVICES)), "--replicas", "3"]
        command += ["--restart-after", str(self._restart_after_seconds)]
        self._storage = self._stack.enter_context(
            Process("threefs serve", command, self.folder / "3fs.log", {})
        )
        wait_for_file(self.cluster_file, self._storage, START_SECONDS)
        self.files = threefs.connect(self.cluster_file)

    def start_driver(self, *manifests: str, state: str = "flyer") -> None:
        """Start `flyer run` as the driver of the example cluster; without a manifest it resumes."""
        folder = self.folder / state
        command = ["flyer.cli", "run", *manifests]
        command += ["--cluster", str(CLUSTER), "--state", str(folder)]
        self._driver = self._stack.enter_context(
            Process(
                "flyer run",
                command,
                self.folder / f"{state}.log",
                {"THREEFS_CLUSTER": str(self.cluster_file)},
            )
        )
        self.client = self._connect(folder, self._driver)
        self.observer = Observer(self.client)

    @property
    def driver(self) -> Process:
        """The process of `flyer run`."""
        assert self._driver is not None
        return self._driver

    def kill_driver(self) -> None:
        """SIGKILL to `flyer`; the kernel ends what it had started."""
        self.driver.kill()

    def kill_service(self, name: str) -> None:
        """SIGKILL to one service of 3FS."""
        if (pid := self.service_pid(name)) is not None:
            kill_all([pid])

    def service_pid(self, name: str) -> int | None:
        """The process id of a service as its supervisor published it; None while it is dead."""
        pid: int | None = json.loads(self.cluster_file.read_text())["pids"].get(name)
        return pid

    def all_chains_whole(self) -> bool:
        """Whether every chain has all its replicas serving."""
        try:
            cluster = json.loads(self.files.status())["cluster"]
        except threefs.ThreeFSError:
            return False  # the manager itself may be the one that is away
        return bool(cluster["chains_whole"] == cluster["chains"])

    def check(self) -> None:
        """Raises DemoError when 3FS or the driver has ended by itself."""
        for process in (self._storage, self._driver):
            if process is not None:
                process.check()

    def _connect(self, state: Path, driver: Process) -> flyer.client.Client:
        deadline = time.monotonic() + START_SECONDS
        while True:
            driver.check()
            try:
                return flyer.client.connect(state)
            except flyer.client.FlyerError as error:
                if time.monotonic() > deadline:
                    raise DemoError(f"flyer run does not answer: {error}") from error
                time.sleep(0.05)


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL to every one of these processes that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
