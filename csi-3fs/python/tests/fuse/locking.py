"""Processes that lock files, one request after the other."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 60.0

PROGRAM = """
import errno, fcntl, json, os, struct, sys
files = {}
def run(what, *args):
    if what == "open":
        files[args[0]] = os.open(args[0], os.O_RDWR | os.O_CREAT, 0o666)
    elif what == "close":
        os.close(files.pop(args[0]))
    elif what == "lockf":
        fcntl.lockf(files[args[0]], *args[1:])
    elif what == "flock":
        fcntl.flock(files[args[0]], args[1])
    elif what == "ofd":
        fcntl.fcntl(files[args[0]], 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
    elif what == "getlk":
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, args[1], args[2], 0)
        found = fcntl.fcntl(files[args[0]], fcntl.F_GETLK, asked)
        return struct.unpack("hhqqi4x", found)
    elif what == "write":
        return os.pwrite(files[args[0]], args[1].encode(), 0)
    elif what == "read":
        return os.pread(files[args[0]], args[1], 0).decode()
for line in sys.stdin:
    try:
        result = run(*json.loads(line))
    except OSError as error:
        result = errno.errorcode[error.errno]
    print(json.dumps(result), flush=True)
"""


def waits(pid: int) -> bool:
    """Whether a process waits for a daemon, according to the kernel."""
    return Path(f"/proc/{pid}/wchan").read_text() == "request_wait_answer"


class Process:
    """A process that uses files of a mount, one request after the other."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, *request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 2 * PATIENCE_SECONDS)
        line = self.process.stdout.readline() if ready else ""
        assert line, "no answer, or the process has ended"
        return json.loads(line)

    def do(self, *request: Any) -> Any:
        self.send(*request)
        return self.receive()

    def waits(self) -> bool:
        """Whether it waits for a daemon."""
        return waits(self.process.pid)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(PATIENCE_SECONDS)
