"""Three real etcd members on this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from threefs.supervisor.ports import choose_ports

from programs import binaries

if TYPE_CHECKING:
    from collections.abc import Iterator

# Helpers next to the tests are imported by name.
sys.path.insert(0, str(Path(__file__).parent))

BOUNDS = ("--max-txn-ops=8192", "--max-request-bytes=8388608")


class Etcd:
    """Three members on this machine."""

    def __init__(self, program: Path, folder: Path) -> None:
        ports = choose_ports(6)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.endpoints = urls[:3]
        peers = ",".join(f"m{number}={url}" for number, url in enumerate(urls[3:]))
        self.folder = folder
        self._commands = [
            [
                str(program),
                f"--name=m{number}",
                f"--data-dir={folder / str(number)}",
                f"--listen-client-urls={urls[number]}",
                f"--advertise-client-urls={urls[number]}",
                f"--listen-peer-urls={urls[3 + number]}",
                f"--initial-advertise-peer-urls={urls[3 + number]}",
                f"--initial-cluster={peers}",
                "--unsafe-no-fsync",
                "--log-level=error",
                *BOUNDS,
            ]
            for number in range(3)
        ]
        self.members = [self._start(number) for number in range(3)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._commands[number], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def restart(self, number: int) -> None:
        self.members[number].kill()
        self.members[number].wait()
        self.members[number] = self._start(number)

    def start_all(self) -> None:
        self.members = [self._start(number) for number in range(3)]

    def end(self) -> None:
        for member in self.members:
            member.kill()
            member.wait()


@pytest.fixture(scope="session")
def etcd_program() -> Path:
    try:
        return binaries.require("etcd")["etcd"]
    except binaries.BinaryError as error:
        pytest.skip(str(error))


@pytest.fixture
def etcd(etcd_program: Path, tmp_path: Path) -> Iterator[Etcd]:
    members = Etcd(etcd_program, tmp_path / "etcd")
    try:
        yield members
    finally:
        members.end()
        shutil.rmtree(tmp_path / "etcd", ignore_errors=True)
