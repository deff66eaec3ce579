"""Credentials for one directory: issued by holders of the key, used instead of it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from threefs import _native
from threefs.cli.output import Output
from threefs.client import connect
from threefs.cluster import ClusterFile, write_atomically
from threefs.durations import seconds_of
from threefs.errors import InvalidArgument, NotADirectory

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["issue", "show"]

# The cluster's name in services and in the CSI driver.
CLUSTER_NAME = "default"


def issue(
    cluster: Path, volume: str, *, read_only: bool, expires: str, node: str, to: Path | None
) -> None:
    """Issue a ticket for a directory with a quota; write it to a file or to standard output."""
    seconds = seconds_of("--expires", expires)
    file = ClusterFile.read(cluster)
    with connect(cluster) as files:
        stat = files.stat(volume)
        if stat.kind != "directory":
            raise NotADirectory(f"`{volume}` is a {stat.kind}; a credential is for a directory")
        if files.quota(volume) is None:
            raise InvalidArgument(
                f"`{volume}` has no quota, which defines the extent of a credential's "
                f"directory; set one first: threefs.connect().set_quota({volume!r}), "
                "without limits if none are wanted"
            )
    text = _native.issue_ticket(
        file.key_file,
        cluster=CLUSTER_NAME,
        directory=stat.inode,
        path=volume,
        read_only=read_only,
        node=node,
        expires_unix_s=int(time.time()) + seconds,
    )
    if to is None:
        sys.stdout.write(text)
    else:
        write_atomically(to, text, mode=0o600)


def show(file: Path, output: Output) -> None:
    """Print what a credential allows; its secret is not shown."""
    cluster, directory, path, read_only, node, expires = _native.read_ticket(str(file))
    fields = {
        "cluster": cluster,
        "path": path,
        "directory": directory,
        "readOnly": read_only,
        "node": node,
        "expires": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires)),
    }
    if output is Output.JSON:
        sys.stdout.write(json.dumps(fields) + "\n")
        return
    for name, value in fields.items():
        sys.stdout.write(f"{name:10} {value}\n")
