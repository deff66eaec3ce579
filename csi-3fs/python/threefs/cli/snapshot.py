"""`threefs snapshot`: snapshots of a volume are created, listed and removed."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from threefs.cli.output import Output, describe_bytes, print_json, printable
from threefs.client import connect

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["create", "list_snapshots", "remove"]


def create(cluster: Path | None, volume: str, name: str, timeout_seconds: float) -> None:
    """Create a snapshot."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        client.snapshots(volume).create(name)
    sys.stdout.write(f"created {volume.rstrip('/')}/.snapshots/{name}\n")


def list_snapshots(
    cluster: Path | None, volume: str, output: Output, timeout_seconds: float
) -> None:
    """Print the snapshots, oldest first."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        snapshots = client.snapshots(volume).all()
    if output is Output.JSON:
        print_json({"volume": volume, "snapshots": [asdict(snapshot) for snapshot in snapshots]})
        return
    if snapshots:
        sys.stdout.write(f"{'CREATED (UTC)':19} {'SIZE':>10} {'INODES':>12}  NAME\n")
    for snapshot in snapshots:
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(snapshot.created_ns / 1e9))
        size = describe_bytes(snapshot.size)
        sys.stdout.write(
            f"{created:19} {size:>10} {snapshot.inodes:>12}  {printable(snapshot.name)}\n"
        )


def remove(cluster: Path | None, volume: str, name: str, timeout_seconds: float) -> None:
    """Remove a snapshot."""
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        client.snapshots(volume).remove(name)
    sys.stdout.write(f"removed {name}; its space is freed in the background\n")
