"""The FUSE daemon of one mount, as `threefs fuse` starts it.

The caller owns the mount: it opened /dev/fuse, mounted with that descriptor, and keeps it, so that
another daemon can continue if this one exits (`threefs.mount` does all of that).
"""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from threefs import _native
from threefs.cluster import one_or_list
from threefs.errors import InvalidArgument, ThreeFSError

if TYPE_CHECKING:
    from threefs.cluster import ClusterFile

__all__ = ["CLAIM_SECONDS", "VALID_SECONDS", "default_state", "run_daemon"]

CLAIM_SECONDS = 20.0
"""Validity of a renewal of the mount's claim; `threefs.csi.volumes.node_claims` waits longer."""

VALID_SECONDS = 1.0
"""Time for which the kernel caches names and attributes; opening a file always revalidates."""


def default_state(descriptor: int) -> Path:
    """Default state file, through which a daemon passes its state to the next one of the mount.

    The name contains the kernel's id of the mount, which is read from the descriptor.
    """
    folder = Path(os.environ.get("THREEFS_RUN", "/run/threefs"))
    try:
        info = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"descriptor {descriptor} or folder `{folder}`: {error}") from error
    number = next((it.split()[1] for it in info.splitlines() if "fuse_connection" in it), None)
    # Older kernels do not report it; the descriptor has the same number in all daemons of a mount.
    return folder / (f"fuse-{number}.state" if number else f"fuse-fd-{descriptor}.state")


def run_daemon(
    cluster: ClusterFile,
    root: str,
    descriptor: int,
    *,
    resume: bool,
    state: Path | None,
    read_only: bool,
    timeout_seconds: float,
    valid_seconds: float = VALID_SECONDS,
    write_back: bool = False,
    claim_for: str = "",
    claim_seconds: float = CLAIM_SECONDS,
    location: str = "",
) -> None:
    """Serve until unmounted or terminated; writes one JSON line to stdout when it serves."""
    config: dict[str, object] = {
        "mgmtd": list(cluster.mgmtd),
        "meta": one_or_list(cluster.meta),
        "key_file": cluster.key_file,
        "tls": cluster.tls,
        "root": root,
        "fd": descriptor,
        "read_only": read_only,
        "resume": resume,
        "state": str(state or default_state(descriptor)),
        "timeout_seconds": timeout_seconds,
        "valid_seconds": valid_seconds,
        "write_back": write_back,
        "location": location,
    }
    if claim_for:
        path = str(PurePosixPath(root).parent)
        config["claim"] = {"path": path, "holder": claim_for, "valid_seconds": claim_seconds}
    try:
        _native.run_fuse(json.dumps(config))
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    except RuntimeError as error:
        raise ThreeFSError(str(error)) from error
