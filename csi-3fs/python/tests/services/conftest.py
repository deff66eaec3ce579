"""Real etcd members and PostgreSQL servers on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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


POSTGRES_SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
shared_buffers = 32MB
max_wal_senders = 10
wal_keep_size = 256MB
dynamic_shared_memory_type = mmap
synchronous_standby_names = 'ANY 1 (*)'
"""


class Postgres:
    """A primary and two standbys, one of which has to acknowledge each commit."""

    USER = "threefs"

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        # PostgreSQL refuses root.
        self._as_user = (
            ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
            if os.geteuid() == 0
            else []
        )
        self.ports = choose_ports(3)
        if self._as_user:
            shutil.chown(folder, "postgres", "postgres")
        options = ["-A", "trust", "-U", self.USER, "--no-sync", "--locale=C", "--wal-segsize=1"]
        self._call("initdb", *options, "-D", str(folder / "0"))
        with (folder / "0" / "postgresql.conf").open("a") as settings:
            settings.write(POSTGRES_SETTINGS)
        self.servers = [self._start(0)]
        for number in (1, 2):
            source = ["-h", "127.0.0.1", "-p", str(self.ports[0]), "-U", self.USER, "--no-sync"]
            backup = ["-R", "-c", "fast", "-X", "stream", *source, "-D", str(folder / str(number))]
            self._call("pg_basebackup", *backup)
            self.servers.append(self._start(number))

    @property
    def url(self) -> str:
        """Every server: services find the one that accepts writes."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"postgresql://{self.USER}@{hosts}/postgres"

    def _call(self, program: str, *arguments: str) -> str:
        command = [*self._as_user, str(self._programs / program), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        arguments = ["-p", str(self.ports[number]), "-D", str(self._folder / str(number))]
        log = self._folder / f"{number}.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [*self._as_user, str(self._programs / "postgres"), *arguments],
                stdout=output,
                stderr=output,
                cwd="/",
            )
        deadline = time.monotonic() + 120
        ready = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1"]
        while subprocess.run([*ready, "-p", str(self.ports[number])], check=False).returncode:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        return server

    def query(self, number: int, statement: str) -> str:
        address = ["-h", "127.0.0.1", "-p", str(self.ports[number]), "-U", self.USER]
        return self._call("psql", "-XAt", *address, "-d", "postgres", "-c", statement).strip()

    def fail_over(self) -> None:
        """Kill the primary; promote the standby with the most, and let the other one follow it."""
        self.servers[0].kill()
        self.servers[0].wait()
        received = "SELECT pg_last_wal_receive_lsn() - '0/0'::pg_lsn"
        promoted = max((1, 2), key=lambda number: int(self.query(number, received)))
        self._call("pg_ctl", "promote", "-t", "120", "-D", str(self._folder / str(promoted)))
        source = f"host=127.0.0.1 port={self.ports[promoted]} user={self.USER}"
        self.query(3 - promoted, f"ALTER SYSTEM SET primary_conninfo = '{source}'")
        self.query(3 - promoted, "SELECT pg_reload_conf()")

    def end(self) -> None:
        for server in self.servers:
            # An immediate shutdown, which ends all processes of the server.
            server.send_signal(signal.SIGQUIT)
            server.wait()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """Servers in memory, if the machine has a folder there: each commit syncs two of them."""
    variable = os.environ.get("FIRE_FLYER_POSTGRES")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=str)
    programs = Path(variable) if variable else found[-1].parent if found else None
    if programs is None:
        pytest.skip("PostgreSQL is not installed; `make test-services` installs it")
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    servers: Postgres | None = None
    try:
        servers = Postgres(programs, folder)
        yield servers
    finally:
        if servers is not None:
            servers.end()
        shutil.rmtree(folder, ignore_errors=True)
