"""`hfreduced` for tests: a fixture that starts daemons."""

import signal
import subprocess
import sys
import threading

import pytest


class Served:
    """A daemon as a process, ready when it is created."""

    def __init__(self, path, *before):
        self.path = path
        command = [*before, sys.executable, "-m", "hfreduce.daemon", "--socket", str(path)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.output = [self.process.stderr.readline()]
        assert "listens at" in self.output[0], self.output
        # Keep reading: a full pipe would block the daemon.
        threading.Thread(
            target=lambda: self.output.extend(self.process.stderr), daemon=True
        ).start()

    @property
    def pid(self):
        return self.process.pid

    @property
    def environment(self):
        return {"HFREDUCE_DAEMON": str(self.path)}

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def daemons(tmp_path):
    """Starts daemons, with a command prefix if one is given; all end with the test."""
    started = []

    def make(*before, path=None):
        started.append(Served(path or tmp_path / f"{len(started)}.sock", *before))
        return started[-1]

    yield make
    for daemon in started:
        daemon.process.kill()
        daemon.process.wait(30)
