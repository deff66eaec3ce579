"""One FUSE daemon on a descriptor that the holder keeps: started, watched, replaced.

A daemon is ready when it has written one JSON line to its standard output. One that ends, or does
not get ready in time, is replaced with ``--resume`` after a pause that grows while it keeps on
failing, unless the mount itself has ended.
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

from .control_groups import WITHOUT, alone

if TYPE_CHECKING:
    from .control_groups import Group

__all__ = ["Daemon", "Report"]

READY_SECONDS = 20.0
"""How long a daemon may take to begin: it must reach 3FS first."""
PAUSES_SECONDS = (0.0, 0.05, 0.2, 1.0, 5.0)
"""Before the first, second, … replacement in a row."""
STEADY_SECONDS = 30.0
"""A daemon that served for so long starts the pauses anew."""
STOP_SECONDS = 3.0
LINE_BYTES_MAX = 65536
LOG_LINES = 5


@dataclass(frozen=True)
class Report:
    """How a daemon is: `starting`, `serving`, `stopped` (by a signal), `down` or `ended`."""

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
        """Begin; returns at once."""
        self._thread = threading.Thread(target=self._run, args=(resume,), daemon=True)
        self._thread.start()

    def wait_ready(self, seconds: float) -> bool:
        """True once it serves; false when it has ended for the first time, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._state in ("serving", "down", "ended"), seconds)
            return self._state == "serving"

    def report(self) -> Report:
        """How it is now."""
        with self._changed:
            process, state = self._process, self._state
            message = "; ".join(self._log) if state != "serving" else ""
            pid = process.pid if process is not None else 0
            report = Report(state, pid, max(0, self._restarts), self._since, message)
        if report.state == "serving" and _is_stopped(report.pid):
            told = f"process {pid} is stopped by a signal; continue it with `kill -CONT {pid}`"
            return Report("stopped", pid, report.restarts, report.since, told)
        return report

    def stop(self, *, at_once: bool = False) -> bool:
        """End it for good: it is asked first, unless `at_once`, and killed when it does not end.

        True if it was there, ended by itself and had nothing left to say.
        """
        with self._changed:
            self._stopping = True
            process = self._process
            self._changed.notify_all()
        patience = 0.0 if at_once else STOP_SECONDS
        # With the mount it ends by itself, once it has told 3FS what it has to tell.
        gently = process is not None and _end(process, patience, ask=not self.is_unmounted())
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        return gently

    def _run(self, resume: bool) -> None:  # noqa: FBT001 -- a thread's argument
        failures = 0
        while True:
            with self._changed:
                pause = PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)]
                if self._changed.wait_for(lambda: self._stopping, pause):
                    self._set("ended")
                    return
                self._restarts += 1
            began = time.monotonic()
            self._one_life(resume)
            if self.is_unmounted():
                self._set("ended")
                return
            resume = True
            failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1

    def _one_life(self, resume: bool) -> None:  # noqa: FBT001
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
            self._note(f"`{command[0]}` cannot be started: {error}")
            self._set("down")
            return
        with self._changed:
            self._process = process
            # `stop` may have looked before there was a process.
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
            # A volume is not kept from its pods.
            self._note(f"{WITHOUT}: {error}")
            return alone(command)

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
            self._note(f"the daemon said {bytes(line[:80])!r} instead of one JSON line")
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
        """Whether the kernel has ended the connection: no daemon can serve it any more."""
        poll = select.poll()
        poll.register(self._descriptor, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))

    def _set(self, state: str) -> None:
        with self._changed:
            self._state, self._since = state, time.time()
            if state == "serving":
                self._log.clear()
            self._changed.notify_all()


def _end(process: subprocess.Popen[bytes], patience: float, *, ask: bool) -> bool:
    """True if it ended by itself, with status 0."""
    if patience:
        if ask:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
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
