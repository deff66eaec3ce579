"""Fixtures: real drivers and jobs, each test in a separate folder; no process survives a test."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from flyer.cli.main import main
from flyer.client import Client, FlyerError, JobView, connect
from flyer.client.connection import reader
from flyer.local.orphan_processes import find_marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_SECONDS = 100.0


def until(
    description: str, condition: Callable[[], Any], timeout_seconds: float = TIMEOUT_SECONDS
) -> Any:
    """Poll until the condition is true. Returns its value."""
    deadline = time.monotonic() + timeout_seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{description}: not within {timeout_seconds:g} s"
        time.sleep(0.01)
    return value


@dataclass
class Bench:
    """One cluster in a folder."""

    folder: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    until = staticmethod(until)

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def cluster(self, **changes: Any) -> Path:
        """The example's six nodes, with short times."""
        settings = {"nodeReturnSeconds": 30, **changes}
        lines = "\n".join(f"{name}: {value}" for name, value in settings.items())
        path = self.folder / "cluster.yaml"
        path.write_text(
            f"name: test\n{lines}\nsettings: {{failureWindowSeconds: 0.2, stopPauseSeconds: 0.5}}\n"
            "nodes:\n"
            "  - {names: [a0, a1, a2], zone: A, nodeClass: a100, slots: 2}\n"
            "  - {names: [b0, b1, b2], zone: B, nodeClass: a100, slots: 2}\n"
        )
        return path

    def manifest(self, name: str = "job", *, script: str = "steps.py", **choices: Any) -> Path:
        """A FlyerJob that runs a script with options; `spec__x` sets spec.x as YAML."""
        spec = {"nodes": 2, "ranksPerNode": 2, "nodeClass": "a100", "progressDeadline": "60s"}
        spec["preemption"] = (
            "{checkpointGracePeriod: 5s, maxCheckpointGracePeriod: 10s, minRuntime: 0s}"
        )
        arguments = ["--folder", str(self.folder / name)]
        for key, value in choices.items():
            if key.startswith("spec__"):
                spec[key.removeprefix("spec__")] = value
            elif value is True:
                arguments.append(f"--{key.replace('_', '-')}")
            else:
                arguments += [f"--{key.replace('_', '-')}", str(value)]
        lines = "\n".join(f"  {key}: {value}" for key, value in spec.items())
        path = self.folder / f"{name}.yaml"
        path.write_text(
            textwrap.dedent(f"""\
            apiVersion: fireflyer.dev/v1alpha1
            kind: FlyerJob
            metadata: {{name: {name}}}
            spec:
            """)
            + lines
            + textwrap.dedent(f"""
              template:
                spec:
                  containers:
                    - name: trainer
                      command: [python, {SCRIPTS / script}]
                      args: {arguments}
            """).replace("\n", "\n  ")
        )
        return path

    def flyer(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run `flyer` to its end in this process, which saves its imports."""
        out, err = io.StringIO(), io.StringIO()
        status: Any = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.setenv("FLYER_STATE", str(self.state))
            patch.setenv("TERM", "xterm-256color")
            patch.delenv("NO_COLOR", raising=False)
            patch.setattr(sys, "argv", ["flyer", *map(str, arguments)])
            with redirect_stdout(out), redirect_stderr(err):
                try:
                    main()
                except SystemExit as ended:
                    status = ended.code
        return subprocess.CompletedProcess(
            ["flyer", *map(str, arguments)], status or 0, out.getvalue(), err.getvalue()
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start `flyer` in the background; its output goes to files next to the state."""
        number = len(self.processes)
        process = subprocess.Popen(
            self._command(arguments),
            stdout=(self.folder / f"out-{number}").open("w"),
            stderr=(self.folder / f"err-{number}").open("w"),
            text=True,
            cwd=self.folder,
            env=self._environment(),
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def drive(self, *arguments: str | Path, **cluster: Any) -> subprocess.Popen[str]:
        """Start a driver."""
        return self.start("run", *arguments, "--cluster", self.cluster(**cluster))

    def client(self) -> Client:
        """A client of the driver, once it answers."""

        def reached() -> Client | None:
            for process in self.processes[-1:]:
                assert process.poll() is None, f"flyer ended early:\n{self.err()}"
            try:
                return connect(self.state)
            except FlyerError:
                return None

        client: Client = until("a driver that answers", reached)
        return client

    def client_on_disk(self) -> Client:
        """A client that reads the state directory without a driver."""
        return reader(self.state)

    def job(self, name: str, condition: Callable[[JobView], Any], description: str) -> JobView:
        """Wait until a job's view meets a condition."""
        client = self.client()
        last: list[JobView] = []

        def look() -> bool:
            last[:] = [job for job in client.jobs() if job.name == name]
            return bool(last) and bool(condition(last[0]))

        until(f"{name}: {description}", look)
        return last[0]

    def step(self, name: str, step: int) -> JobView:
        """Wait until a job has reported a step."""
        return self.job(
            name, lambda job: job.progress and job.progress.step >= step, f"step {step}"
        )

    def out(self, number: int = -1) -> str:
        number = len(self.processes) + number if number < 0 else number
        return (self.folder / f"out-{number}").read_text()

    def err(self, number: int = -1) -> str:
        number = len(self.processes) + number if number < 0 else number
        return (self.folder / f"err-{number}").read_text()

    def ended(self, process: subprocess.Popen[str]) -> int:
        """The exit status of a background `flyer`."""
        return process.wait(TIMEOUT_SECONDS)

    def survivors(self) -> list[int]:
        """Processes of pods of this state directory that exist."""
        return find_marked(self.state)

    def go(self, name: str = "job") -> None:
        """Let a held job continue."""
        (self.folder / name / "go").touch()

    def reasons(self, name: str) -> list[str]:
        """The reasons of a job's events so far."""
        return [event.reason for event in self.client().events(job=name)]

    def _command(self, arguments: tuple[str | Path, ...]) -> list[str]:
        return [sys.executable, "-m", "flyer.cli", *map(str, arguments)]

    def _environment(self) -> dict[str, str]:
        # No stream is a terminal, which must disable colours.
        inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        return {**inherited, "FLYER_STATE": str(self.state), "TERM": "xterm-256color"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A cluster that is stopped after the test, which must leave no process."""
    bench = Bench(tmp_path)
    yield bench
    for process in bench.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in bench.processes:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    until("no process left", lambda: not bench.survivors())
