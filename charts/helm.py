"""`python charts/helm.py ARGUMENTS`: run Helm, which is built once if it is not installed.

Search order: `$HELM`, `build/tools/bin/helm`, a `helm` on the path, else `go install` (a minute).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["VERSION", "find"]

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "build" / "tools" / "bin"
VERSION = "v3.19.0"
# As in Helm's release build: the version of Kubernetes for which it renders by default.
KUBERNETES = ("1", "34")
BUILD_SECONDS = 1200


def find() -> str:
    """The path of Helm, which is built if it is missing."""
    if named := os.environ.get("HELM"):
        return named
    path = TOOLS / "helm"
    if not path.exists() and (installed := shutil.which("helm")):
        return installed
    if not path.exists():
        _build(path)
    return str(path)


def _build(target: Path) -> None:
    if shutil.which("go") is None:
        raise SystemExit("helm is missing: install it from https://helm.sh, or Go to build it")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several test processes may need it at the same time; only one builds it.
    with (target.parent / ".helm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        print(f"helm: building {VERSION} from its Go module, once", file=sys.stderr)
        names = "helm.sh/helm/v3/pkg/chartutil.k8sVersion"
        flags = f"-s -w -X {names}Major={KUBERNETES[0]} -X {names}Minor={KUBERNETES[1]}"
        subprocess.run(
            ["go", "install", "-ldflags", flags, f"helm.sh/helm/v3/cmd/helm@{VERSION}"],
            env={**os.environ, "GOBIN": str(target.parent)},
            timeout=BUILD_SECONDS,
            check=True,
        )


if __name__ == "__main__":
    command = [find(), *sys.argv[1:]]
    os.execv(command[0], command)  # noqa: S606 -- the program's path, no shell
