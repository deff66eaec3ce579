"""csi-sanity against the driver as it is deployed: processes, a real 3FS, real FUSE mounts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from threefs.csi.holder_client import HolderClient
from threefs.csi.main import holder_command
from threefs.csi.testing import sanity

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORT = Path(__file__).parents[2] / "build" / "e2e" / "csi-sanity.xml"
READY_SECONDS = 90.0
CSI = "import sys; from threefs.csi.main import main; sys.exit(main())"


class Deployed:
    """3FS, the holder, the controller and the node service on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubelet = folder / "kubelet"
        self.kubelet.mkdir()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start everything and wait until it can be used."""
        serve = [sys.executable, "-m", "threefs", "serve", "--data", str(self.folder / "3fs")]
        self._until_it_says("ready", serve)
        (self.folder / "clusters").mkdir()
        (self.folder / "clusters" / "default").symlink_to(self.folder / "3fs")
        shared = ("--clusters", str(self.folder / "clusters"))
        socket = str(self.folder / "holder.sock")
        own = ("--socket", socket, "--kubelet-dir", str(self.kubelet))
        self._until_it_says("ready", holder_command([*own, *shared]))
        named = (*shared, "--driver-name", sanity.DRIVER_NAME, "--metrics-port", "0")
        for what, more in (("controller", ()), ("node", ("--holder", socket, "--node-id", "n"))):
            endpoint = ("--endpoint", self.endpoint(what))
            self._start([sys.executable, "-c", CSI, what, *endpoint, *named, *more])
            deadline = time.monotonic() + READY_SECONDS
            while not (self.folder / f"{what}.sock").exists():
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.05)

    def endpoint(self, what: str) -> str:
        """Where the controller or the node service listens."""
        return f"unix://{self.folder}/{what}.sock"

    def log(self) -> str:
        """What all of them said."""
        return (self.folder / "log").read_text()[-20_000:]

    def stop(self) -> None:
        """End everything; what is still mounted is undone by the holder first."""
        if len(self.processes) > 1 and self.processes[1].poll() is None:
            client = HolderClient(self.folder / "holder.sock")
            for mounted in reversed(client.state()[0]):
                client.unmount(mounted.target)
        for process in reversed(self.processes):
            process.terminate()
            process.wait(timeout=READY_SECONDS)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        with (self.folder / "log").open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self.processes.append(process)
        return process

    def _until_it_says(self, word: str, command: list[str]) -> None:
        process = self._start(command)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(word), self.log()


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    """Everything, ended after the test."""
    help_text = [sys.executable, "-m", "threefs", "fuse", "--help"]
    if subprocess.run(help_text, capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("this build of threefs has no FUSE daemon")
    deployed = Deployed(tmp_path)
    try:
        deployed.start()
        yield deployed
    finally:
        deployed.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="FUSE mounts need root")
@pytest.mark.timeout(1200)
def test_csi_sanity_finds_nothing(deployed: Deployed) -> None:
    """0 failures; skipped is only what the driver does not say that it can."""
    program = sanity.build()
    if program is None:
        pytest.skip("csi-sanity is built with Go, which is not here")
    outcome = sanity.run(
        program,
        deployed.endpoint("node"),
        deployed.endpoint("controller"),
        deployed.kubelet,
        REPORT,
    )
    assert outcome.failed == (), outcome.text + deployed.log()
    assert outcome.status == 0, outcome.text
    assert outcome.passed >= 49, outcome.text
    assert all(words.endswith(("supported", "pending")) for words in outcome.skipped)
