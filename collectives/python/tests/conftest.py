"""`hfreduced` for tests: as many as they ask for."""

import signal
import subprocess
import sys
import threading

import pytest


class Served:
    """A daemon as a process, ready when made."""

    def __init__(self, path, *before):
        self.path = path
        command = [*before, sys.executable, "-m", "hfreduce.daemon", "--socket", str(path)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = [self.process.stderr.readline()]
        assert "listens at" in self.said[0], self.said
        # Read on: a full pipe would stop it.
        threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True).start()

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
    """Makes daemons, behind a command if one is given; all end with the test."""
    made = []

    def make(*before, path=None):
        made.append(Served(path or tmp_path / f"{len(made)}.sock", *before))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait(30)
