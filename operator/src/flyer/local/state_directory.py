"""State directory of a local cluster: its layout and its discovery by clients.

One folder per cluster, `.flyer/<cluster name>/` unless `--state` or FLYER_STATE says otherwise:

    cluster.json            the cluster as the driver read it
    lock                    held (flock) by the running driver
    jobs/<ns>.<name>.json   FlyerJob objects: the committed decisions
    decisions.jsonl         the engine's inputs and decisions, replayable
    events.jsonl            user-visible events, with stable reasons
    logs/<ns>.<name>/attempt-N/rank-NNNN.log
    run/                    sockets and per-attempt files; useless without the driver

This module reads only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flyer.errors import FlyerError

__all__ = ["STATE_ENVIRONMENT", "StatePaths", "driver_alive", "find_state"]

STATE_ENVIRONMENT = "FLYER_STATE"
STATES_FOLDER = ".flyer"
# A UNIX socket's path is at most 107 bytes; the longest name below run/ takes under 40.
RUN_PATH_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class StatePaths:
    """The paths inside one state directory."""

    root: Path

    @property
    def lock(self) -> Path:
        """Locked with flock while a driver runs."""
        return self.root / "lock"

    @property
    def cluster(self) -> Path:
        """The cluster as the driver read it."""
        return self.root / "cluster.json"

    @property
    def jobs(self) -> Path:
        """One FlyerJob object a file."""
        return self.root / "jobs"

    @property
    def decisions(self) -> Path:
        """The engine's decision log."""
        return self.root / "decisions.jsonl"

    @property
    def events(self) -> Path:
        """User events."""
        return self.root / "events.jsonl"

    @property
    def logs(self) -> Path:
        """Raw output of all ranks of all attempts."""
        return self.root / "logs"

    @property
    def run(self) -> Path:
        """Sockets and per-attempt files: short enough for a socket's address."""
        inside = self.root / "run"
        if len(os.fsencode(inside)) <= RUN_PATH_BYTES_MAX:
            return inside
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"flyer-{os.getuid()}-{digest}"

    @property
    def control(self) -> Path:
        """The driver's control socket."""
        return self.run / "control.sock"

    def job_logs(self, key: str) -> Path:
        """Folder of the ranks' output of the job `namespace/name`."""
        return self.logs / key.replace("/", ".")


def owned_privately(folder: Path) -> bool:
    """Whether this user owns a folder and no other may write to it (it may be in /tmp)."""
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    )


def driver_alive(paths: StatePaths) -> bool:
    """Whether a driver holds the lock. The kernel releases it when the process ends."""
    try:
        descriptor = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def find_state(state: str | Path | None = None, start: Path | None = None) -> StatePaths:
    """The user's state directory: named, from the environment, or the only one in `.flyer/`."""
    named = state or os.environ.get(STATE_ENVIRONMENT)
    if named:
        root = Path(named).expanduser().absolute()
        if not root.is_dir():
            raise FlyerError.unreachable(
                f"no cluster state at `{root}`",
                "start the cluster with `flyer run JOB.yaml --cluster CLUSTER.yaml`, "
                "or name its folder with --state",
            )
        return StatePaths(root)
    folder = (start or Path.cwd()) / STATES_FOLDER
    roots = sorted(path.parent for path in folder.glob("*/lock"))
    if not roots:
        raise FlyerError.unreachable(
            f"no cluster state below `{folder}`",
            "start a cluster with `flyer run JOB.yaml --cluster CLUSTER.yaml`, "
            "or name its folder with --state",
        )
    alive = [root for root in roots if driver_alive(StatePaths(root))]
    candidates = alive or roots
    if len(candidates) > 1:
        names = ", ".join(f"`{path}`" for path in candidates)
        raise FlyerError.usage(
            f"{len(candidates)} clusters have state here: {names}", "choose one with --state"
        )
    return StatePaths(candidates[0].absolute())
