"""Supervisor of one FUSE daemon on a managed descriptor: starts, watches and replaces it.

A daemon is ready when it has written one JSON line to standard output. A daemon that ends, or is
not ready in time, is replaced with ``--resume`` after a pause that grows with consecutive failures,
unless the mount itself has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cgroups import WITHOUT, without_group

if TYPE_CHECKING:
    from .cgroups import Group

__all__ = ["Daemon", "Report"]

READY_SECONDS = 20.0
"""Start timeout of a daemon, which has to connect to 3FS first."""
PAUSES_SECONDS = (0.0, 0.05, 0.2, 1.0, 5.0)
"""Pauses before the first, second, … consecutive replacement."""
STEADY_SECONDS = 30.0
"""After serving for this time a daemon resets the pauses."""
STOP_SECONDS = 3.0
LINE_BYTES_MAX = 65536
LOG_LINES = 5


@dataclass(frozen=True)
class Report:
    """State of a daemon: `starting`, `serving`, `stopped` (by a signal), `down` or `ended`."""

    state: str
    pid: int
    restarts: int
    since: float
    message: str


class Daemon:
    """Runs from `start` until `stop`; thread-safe."""

    def __init__(
        self, command: list[str], descriptor: int, volume: str, group: Group | None = None
    ) -> None:
        self._command = command
        self._group = group
        self._descriptor = descriptor
        self._volume = volume
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._state, self._since = "starting", time.time()
        self._restarts = -1
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, *, resume: bool) -> None:
        """Start the daemon; returns immediately."""
        self._thread = threading.Thread(target=self._run, args=(resume,), daemon=True)
        self._thread.start()

    def wait_ready(self, seconds: float) -> bool:
        """Return True once it serves, or False after its first failure or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._state in ("serving", "down", "ended"), seconds)
            return self._state == "serving"

    def report(self) -> Report:
        """Return the present state."""
        with self._changed:
            process, state = self._process, self._state
            message = "; ".join(self._log) if state != "serving" else ""
            pid = process.pid if process is not None else 0
            report = Report(state, pid, max(0, self._restarts), self._since, message)
        if report.state == "serving" and _is_stopped(report.pid):
            message = f"process {pid} is stopped by a signal; continue it with `kill -CONT {pid}`"
            return Report("stopped", pid, report.restarts, report.since, message)
        return report

    def stop(self, *, at_once: bool = False) -> bool:
        """Stop it for good: terminate it, unless `at_once`, and kill it if it does not end.

        Return True if it was running and ended by itself with status 0.
        """
        with self._changed:
            self._stopping = True
            process = self._process
            self._changed.notify_all()
        timeout = 0.0 if at_once else STOP_SECONDS
        # After an unmount it ends by itself, once it has reported lengths and releases to 3FS.
        clean = process is not None and _end(process, timeout, terminate=not self.is_unmounted())
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        return clean

    def _run(self, resume: bool) -> None:  # noqa: FBT001 -- a thread's argument
        failures = 0
        while True:
            with self._changed:
                pause = PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)]
                if self._changed.wait_for(lambda: self._stopping, pause):
                    self._set("ended")
                    return
                self._restarts += 1
            start = time.monotonic()
            self._run_once(resume)
            if self.is_unmounted():
                self._set("ended")
                return
            resume = True
            failures = 1 if time.monotonic() - start > STEADY_SECONDS else failures + 1

    def _run_once(self, resume: bool) -> None:  # noqa: FBT001
        command = [*self._command, "--fd", str(self._descriptor), *(["--resume"] * resume)]
        kills = self._group.kills() if self._group else 0
        try:
            process = subprocess.Popen(
                self._in_group(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(self._descriptor,),
                process_group=0,
            )
        except OSError as error:
            self._note(f"cannot start `{command[0]}`: {error}")
            self._set("down")
            return
        with self._changed:
            self._process = process
            # `stop` may have been called before the process existed.
            if self._stopping:
                process.kill()
        reader = threading.Thread(target=self._read_errors, args=(process,), daemon=True)
        reader.start()
        if self._read_ready(process):
            self._set("serving")
        else:
            process.kill()
        status = process.wait()
        reader.join(1.0)
        assert process.stdout is not None
        process.stdout.close()
        if not self._stopping:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            if self._group and self._group.kills() > kills:
                how += ": out of memory"
            self._note(f"the daemon (process {process.pid}) ended with {how}")
            self._set("down")

    def _in_group(self, command: list[str]) -> list[str]:
        if self._group is None:
            return command
        try:
            return self._group.enter(command)
        except OSError as error:
            # The volume stays available without its group.
            self._note(f"{WITHOUT}: {error}")
            return without_group(command)

    def _read_ready(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.stdout is not None
        line = bytearray()
        deadline = time.monotonic() + READY_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._note(f"the daemon was not ready after {READY_SECONDS:g} s")
                    return False
                part = os.read(process.stdout.fileno(), 4096)
                if not part:
                    return False
                line += part
        try:
            return isinstance(json.loads(line), dict)
        except ValueError:
            self._note(f"the daemon wrote {bytes(line[:80])!r} instead of one JSON line")
            return False

    def _read_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as errors:
            for line in errors:
                text = line.decode(errors="replace").rstrip()[:500]
                self._note(text)

    def _note(self, text: str) -> None:
        with self._changed:
            self._log.append(text)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{self._volume}: {text}\n")

    def is_unmounted(self) -> bool:
        """Whether the kernel has ended the connection, so that daemons can no longer serve it."""
        poll = select.poll()
        poll.register(self._descriptor, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))

    def _set(self, state: str) -> None:
        with self._changed:
            self._state, self._since = state, time.time()
            if state == "serving":
                self._log.clear()
            self._changed.notify_all()


def _end(process: subprocess.Popen[bytes], timeout: float, *, terminate: bool) -> bool:
    """End a process; return True if it ended by itself, with status 0."""
    if timeout:
        if terminate:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    return process.returncode == 0


def _is_stopped(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")
