"""The chart in a test cluster: installed, upgraded, removed, as a user would."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charts import helm

if TYPE_CHECKING:
    from e2e.cluster.handle import Cluster

__all__ = ["NAMESPACE", "OPERATOR_ALONE", "Release"]

ROOT = Path(__file__).parents[1]
NAMESPACE = "fireflyer-system"
NAME = "fire-flyer"
DEADLINE_S = 300

OPERATOR_ALONE: dict[str, Any] = {
    "threefs.enabled": False,
    "csi.enabled": False,
    "nodeAgent.enabled": False,
}


@dataclass(frozen=True)
class Release:
    """The one release of a cluster; `values` go over those of values.yaml."""

    cluster: Cluster

    def install(self, values: dict[str, Any]) -> None:
        """Installs or upgrades; returns when everything is Ready."""
        sets = [word for k, v in values.items() for word in ("--set-json", f"{k}={json.dumps(v)}")]
        chart, test_values = ROOT / "charts" / "fire-flyer", ROOT / "e2e" / "values.yaml"
        arguments = ["--create-namespace", "--wait", f"--timeout={DEADLINE_S}s"]
        arguments += [f"--values={test_values}", *sets]
        try:
            self._helm("upgrade", "--install", NAME, str(chart), *arguments)
        except subprocess.CalledProcessError as error:
            raise AssertionError(f"helm: {error.stderr}\n{self.diagnosis()}") from None

    def uninstall(self) -> None:
        """Removes the release; the definitions of our kinds stay, and the jobs with them."""
        self._helm("uninstall", NAME, "--wait", f"--timeout={DEADLINE_S}s", "--ignore-not-found")

    def diagnosis(self) -> str:
        """What a person would look at first when something of ours does not come up."""
        namespaced = f"--namespace={NAMESPACE}"
        pods = self.cluster.kubectl("get", "pods", namespaced, "--output=wide")
        events = self.cluster.kubectl("events", namespaced).splitlines()[-30:]
        logs = self.cluster.kubectl(
            *("logs", namespaced, "--selector=app.kubernetes.io/name=fire-flyer"),
            *("--all-containers", "--prefix", "--tail=15", "--ignore-errors"),
        )
        return "\n".join([pods, *events, logs])

    def _helm(self, *arguments: str) -> None:
        subprocess.run(
            [helm.find(), f"--namespace={NAMESPACE}", *arguments],
            env=os.environ | {"KUBECONFIG": self.cluster.kubeconfig},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S + 60,
            check=True,
        )
