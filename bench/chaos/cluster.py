"""A cluster of real processes: `threefs serve`, its services by their roles, and its checks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import threefs
from threefs.cli.members import member_states
from threefs.cluster import ClusterFile
from threefs.mount import Mount

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["ChaosCluster", "ChaosError", "wait_for"]

T = TypeVar("T")

STATUS_SECONDS = 5.0
ROLE_SECONDS = 30.0
STOP_SECONDS = 60.0
FSCK_SECONDS = 300.0
POLL_SECONDS = 0.02


class ChaosError(Exception):
    """A run could not be carried out, or the cluster did not recover."""


class ChaosCluster:
    """One cluster in a folder."""

    def __init__(self, folder: Path, options: list[str], node_failure_ms: int) -> None:
        self.folder = folder
        self.data = folder / "cluster"
        self.lease_seconds = 3 * node_failure_ms / 1000
        self._mounts: list[Mount] = []
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "threefs", "serve", "--data", str(self.data), *options]
        timers = ["--node-failure-ms", str(node_failure_ms), "--ready-timeout", "120"]
        with (folder / "serve.log").open("w") as errors:
            self._process = subprocess.Popen(
                [*command, *timers], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
        except BaseException:
            # This process was told to end meanwhile.
            self._end_supervisor()
            raise
        if not line.startswith("ready"):
            self._end_supervisor()
            raise ChaosError((folder / "serve.log").read_text()[-2000:])

    @property
    def file(self) -> Path:
        """The `cluster.json`."""
        return self.data / "cluster.json"

    def client(self, timeout_seconds: float = ROLE_SECONDS) -> threefs.Client:
        """A new client."""
        return threefs.connect(self.file, timeout_seconds=timeout_seconds)

    def clients_of_each_meta(self, timeout_seconds: float) -> list[threefs.Client]:
        """A client of each metadata service, which uses no other one."""
        file = ClusterFile.read(self.file)
        return [
            threefs.Client(replace(file, meta=(address,)), timeout_seconds=timeout_seconds)
            for address in file.meta
        ]

    def mount(self, count: int) -> list[Path]:
        """Mounts the root this many times, each with its own daemon."""
        targets = []
        for number in range(count):
            target = self.folder / f"mount-{number}"
            target.mkdir()
            state, log = self.folder / f"mount-{number}.state", self.folder / f"mount-{number}.log"
            self._mounts.append(Mount(self.file, "/", target, state, log=log, timeout_seconds=60.0))
            targets.append(target)
        return targets

    def pids(self) -> dict[str, int]:
        """Running processes of the services, by name."""
        return dict(ClusterFile.read(self.file).pids)

    def find(self, victim: str, choice: int) -> str:
        """The name of the service for a fault: the one that leads, or any one of its kind."""
        if victim in ("etcd", "mgmtd"):
            return wait_for(lambda: self._leader(victim), ROLE_SECONDS, f"a {victim} that leads")
        names = sorted(name for name in self.pids() if name.partition("-")[0] == victim)
        return names[choice % len(names)]

    def _leader(self, kind: str) -> str | None:
        services = ClusterFile.read(self.file).services
        names = {address: name for name, address in services.items()}
        try:
            if kind == "etcd":
                states = member_states(ClusterFile.read(self.file).etcd, STATUS_SECONDS)
            else:
                states = self.status()["mgmtds"]
        except threefs.ThreeFSError:
            return None
        leaders = [names[each["address"]] for each in states if each["leads"]]
        return leaders[0] if len(leaders) == 1 else None

    def status(self) -> dict[str, Any]:
        """The cluster's status."""
        with self.client(STATUS_SECONDS) as client:
            status: dict[str, Any] = json.loads(client.status())
        return status

    def is_whole(self) -> bool:
        """Whether every service, member and target serves."""
        file = ClusterFile.read(self.file)
        if set(file.pids) != set(file.services):
            return False
        try:
            status = self.status()
        except threefs.ThreeFSError:
            return False
        members = member_states(file.etcd, STATUS_SECONDS)
        states = {each["state"] for kind in ("mgmtds", "metas") for each in status[kind]}
        cluster = status["cluster"]
        return (
            bool(cluster["chains"])
            and cluster["chains"] == cluster["chains_whole"]
            and states <= {"serving", "standby"}
            and all(each["state"] == "serving" for each in members)
        )

    def check(self) -> list[str]:
        """Findings of `threefs fsck` about the metadata and about the chunks."""
        etcd = ClusterFile.read(self.file).etcd
        findings = []
        if etcd.endpoints:
            store = ["--etcd-endpoints", etcd.endpoints, "--etcd-prefix", etcd.prefix]
            for option in ("ca_file", "cert_file", "key_file"):
                store += [f"--etcd-{option.replace('_', '-')}", str(getattr(etcd, option))]
        else:
            store = ["--data", str(self.data / "data" / "meta")]
        metadata = self._fsck(*store)
        if metadata["findings_total"]:
            findings.append(f"fsck: {json.dumps(metadata['findings'][:5])}")
        chunks = self._fsck("--chunks", "--cluster", str(self.file))
        missing = chunks["missing_chunks"] + chunks["unconfirmed_chunks"]
        if missing or chunks["not_read"] or chunks["leaked"]["inodes"]:
            findings.append(f"fsck --chunks: {json.dumps(chunks)[:2000]}")
        return findings

    def _fsck(self, *options: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "threefs", "fsck", *options, "-o", "json"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FSCK_SECONDS, check=False
        )
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise ChaosError(f"`{' '.join(command)}` failed: {done.stderr[-2000:]}") from None
        return report

    def keep_logs(self, folder: Path) -> None:
        """Copies the logs of all services and mounts."""
        shutil.copytree(self.data / "logs", folder / "logs", dirs_exist_ok=True)
        for log in self.folder.glob("*.log"):
            shutil.copy(log, folder / "logs")

    def stop(self) -> None:
        """Unmounts, and stops every process, also stopped ones."""
        for mount in self._mounts:
            mount.close()
        with contextlib.suppress(OSError, threefs.ThreeFSError):
            for pid in self.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self._end_supervisor()

    def _end_supervisor(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def wait_for(look: Callable[[], T | None], seconds: float, description: str) -> T:
    """Waits until `look` returns something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := look():
            return value
        time.sleep(POLL_SECONDS)
    raise ChaosError(f"no {description} within {seconds:g} s")
