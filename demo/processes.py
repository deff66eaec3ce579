"""The processes of the demo, 3FS and the scheduler's driver, and their shutdown order."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any, Self

from demo.observer import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

END_SECONDS = 20.0
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """A demo that is killed leaves nothing behind (prctl(2))."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Holds the folder for this demo alone.

    Raises:
        DemoError: another demo runs here.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise DemoError(
                f"another demo (process {file.read().strip() or 'unknown'}) runs in {lock.parent}; "
                "wait for it, end it, or give this one a separate folder with --folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


class Process:
    """A child in a separate process group, with its output in a file; it ends with the demo."""

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.name, self.log = name, log
        self._file: IO[bytes] = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raises DemoError with the end of the log if the process has ended."""
        if self.status is not None:
            raise DemoError(f"{self.name} ended with status {self.status}\n{self.tail}")

    @property
    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-30:]
        return "\n".join([f"(the end of {self.log})", *lines])

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._process.kill()
        self._process.wait(END_SECONDS)

    def end(self) -> None:
        """SIGTERM, then SIGKILL to the whole group."""
        if self.status is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(END_SECONDS)
        self._file.close()

    def wait(self, timeout_seconds: float) -> int:
        """Waits for the end; returns the exit status."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"{self.name} did not end within {timeout_seconds:g} s") from error


def wait_for_file(path: Path, process: Process, timeout_seconds: float) -> dict[str, Any]:
    """The JSON document at `path` once it is there and whole."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        process.check()
        with contextlib.suppress(OSError, ValueError):
            document: dict[str, Any] = json.loads(path.read_text())
            return document
        time.sleep(0.02)
    raise DemoError(f"{process.name} did not write {path} within {timeout_seconds:g} s")
