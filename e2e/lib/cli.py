"""Runner of the `flyer` command line against a test cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from programs import binaries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from testcluster.handle import Cluster

__all__ = ["Flyer", "status_of"]

SECONDS = 300.0


@dataclass(frozen=True)
class Flyer:
    """Its verbs in one namespace: `flyer("ps")` is what `flyer ps -o json` prints, parsed."""

    cluster: Cluster
    namespace: str
    plugin: bool = False
    """By way of kubectl, which finds `kubectl-flyer` on its PATH."""

    def __call__(self, verb: str, *words: str, status: int = 0) -> Any:
        """Runs one verb; raises AssertionError with its output on another exit status."""
        result = self.run(verb, *words, "--output=json", status=status)
        return json.loads(result.stdout)

    def run(self, verb: str, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs one verb with text output."""
        result = subprocess.run(
            self._command(verb, *words),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == status, (
            verb,
            words,
            result.returncode,
            result.stdout,
            result.stderr,
        )
        return result

    @contextmanager
    def running(self, verb: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Runs a verb in the background; `status_of` waits for its end."""
        process = subprocess.Popen(
            self._command(verb, *words),
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def _command(self, verb: str, *words: str) -> list[str]:
        target = [f"--kubeconfig={self.cluster.kubeconfig}", f"--namespace={self.namespace}"]
        if self.plugin:
            return [str(binaries.find("kubectl")), "flyer", verb, *target, *words]
        return [sys.executable, "-m", "flyer.cli", verb, *target, *words]

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name != "FLYER_STATE"}
        programs = Path(sys.executable).parent  # where the package's programs are installed
        return {**own, "PATH": f"{programs}{os.pathsep}{own['PATH']}"}


def status_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for a verb started by `running`; returns its exit status and output."""
    output, _ = process.communicate(timeout=SECONDS)
    return process.returncode, output
