"""Runner of csi-sanity, the CSI project's driver tests: builds it, runs it, reads its report."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DRIVER_NAME", "Outcome", "build", "run"]

VERSION = "v5.5.0"
PACKAGE = f"github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@{VERSION}"
BUILD_SECONDS = 600
RUN_SECONDS = 600
DRIVER_NAME = "threefs.csi.fireflyer.dev"
"""csi-sanity requires a letter first (RFC 1035); Kubernetes accepts a digit, too, and the driver's
name starts with one. Therefore these tests run it under this name (`--driver-name`)."""


@dataclass(frozen=True)
class Outcome:
    """The report of csi-sanity."""

    status: int
    passed: int
    failed: tuple[str, ...]
    skipped: Counter[str]
    text: str


def build() -> Path | None:
    """The program, built once and kept in the user's cache; None without Go."""
    go = shutil.which("go")
    if go is None:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fire-flyer"
    folder = cache / f"csi-sanity-{VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "csi-sanity"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            environment = {**os.environ, "GOBIN": str(folder), "GOFLAGS": "-mod=mod"}
            subprocess.run(
                [go, "install", PACKAGE], env=environment, check=True, timeout=BUILD_SECONDS
            )
    return program


def run(program: Path, node: str, controller: str, kubelet_dir: Path, report: Path) -> Outcome:
    """All of its tests against the driver at two endpoints; paths are below `kubelet_dir`."""
    for name in ("mount", "stage"):
        (kubelet_dir / name).mkdir(parents=True, exist_ok=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    mutable_parameters = report.with_name("mutable-parameters.yaml")
    mutable_parameters.write_text('inodes: "5000"\ntrash: 1d\n')
    result = subprocess.run(
        [
            str(program),
            f"--csi.endpoint={node}",
            f"--csi.controllerendpoint={controller}",
            f"--csi.mountdir={kubelet_dir}/mount/target",
            f"--csi.stagingdir={kubelet_dir}/stage/target",
            f"--csi.testvolumemutableparameters={mutable_parameters}",
            f"--ginkgo.junit-report={report}",
            "--ginkgo.no-color",
        ],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    cases = list(ET.parse(report).iter("testcase"))
    skipped: Counter[str] = Counter()
    for case in cases:
        if (reason := case.find("skipped")) is not None:
            skipped[str(reason.get("message"))] += 1
    failed = tuple(
        str(case.get("name"))
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    )
    passed = len(cases) - len(failed) - sum(skipped.values())
    return Outcome(result.returncode, passed, failed, skipped, result.stdout + result.stderr)
