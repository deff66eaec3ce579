"""Namespaces of the benchmark and of its peers: their mounts and processes end with them.

The kernel removes a mount namespace, and kills the processes of a PID namespace, when their first
process ends, also after SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Volume", "isolate", "mounted"]

UNSHARE: Final = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@dataclass(frozen=True, slots=True)
class Volume:
    """A mounted volume of a peer."""

    path: Path
    """Usable outside the namespace."""
    pid: int
    """The first process of the namespace; all services descend from it."""
    mount: str
    """The path inside the namespace, an argument of the process that serves the mount."""


def isolate() -> None:
    """Run this program again as the first process of namespaces, unless it is one. Needs root.

    SIGKILL and SIGTERM end both. Ctrl-C interrupts the second one, which cleans up.
    """
    if os.getpid() == 1 or not all(map(shutil.which, (UNSHARE[0], "setpriv"))):
        return
    signal.signal(signal.SIGINT, lambda *_: None)
    # While unshare waits it blocks SIGTERM, so it cannot replace this process.
    command = ["setpriv", "--pdeathsig", "KILL", *UNSHARE, *sys.orig_argv]
    raise SystemExit(subprocess.call(command))


@contextmanager
def mounted(script: str, folder: Path, name: str, *further: str) -> Iterator[Volume]:
    """The volume that a shell script mounts at `mount` in the folder before it prints `mounted`.

    `further` are options of unshare for additional namespaces. The script ends with its input.

    Raises:
        RuntimeError: The volume could not be mounted.
    """
    folder.mkdir(parents=True)
    target = folder.resolve() / "mount"
    process = subprocess.Popen(
        [*UNSHARE, *further, "sh", "-c", script, "sh", str(target.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "mounted\n":
            raise RuntimeError(f"{name} does not start; its messages are above")
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        path = Path(f"/proc/{child}/root") / target.relative_to("/")
        yield Volume(path, int(child), str(target))
    finally:
        process.kill()
        process.communicate()
