"""`flyer` as a person runs it, against a cluster of tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from e2e.cluster.handle import Cluster

__all__ = ["Flyer"]

SECONDS = 300.0


@dataclass(frozen=True)
class Flyer:
    """Its verbs in one namespace: `flyer("ps")` is what `flyer ps -o json` prints, parsed."""

    cluster: Cluster
    namespace: str

    def __call__(self, verb: str, *words: str, status: int = 0) -> Any:
        """One verb; an AssertionError with what it said unless it ends with this status."""
        done = self.run(verb, *words, "--output=json", status=status)
        return json.loads(done.stdout)

    def run(self, verb: str, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """One verb, for people."""
        target = (f"--kubeconfig={self.cluster.kubeconfig}", f"--namespace={self.namespace}")
        done = subprocess.run(
            [sys.executable, "-m", "flyer.cli", verb, *words, *target],
            env={name: value for name, value in os.environ.items() if name != "FLYER_STATE"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == status, (verb, words, done.returncode, done.stdout, done.stderr)
        return done
