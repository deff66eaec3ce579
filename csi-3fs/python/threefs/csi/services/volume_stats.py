"""Usage and condition of a mounted volume in the terms of the specification. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from threefs.csi.proto import csi_pb2 as csi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threefs.client import Quota
    from threefs.csi.mount_manager_client import MountPoint, MountStatus

__all__ = ["condition_of", "usage_of"]

INODES_SHOWN = 1 << 40
"""Reported for a volume without a limit."""

REMEDIES = {
    "starting": "its FUSE daemon is starting; programs wait until it serves",
    "stopped": "its FUSE daemon is stopped by a signal; continue it",
    "down": "its FUSE daemon ended and is being replaced; programs wait until it serves",
    "ended": "its FUSE daemon was ended; delete the pod so that it is recreated",
}


def condition_of(point: MountPoint, mounts: Sequence[MountStatus]) -> csi.VolumeCondition:
    """Return normal while a daemon serves; otherwise the problem and the remedy."""
    mount = next((mount for mount in mounts if mount.device == point.device), None)
    if mount is None:
        return csi.VolumeCondition(
            abnormal=True,
            message="the mount manager that owned this mount has died; delete the pods that use "
            "the volume on this node, so that it is mounted again",
        )
    if mount.state == "serving":
        return csi.VolumeCondition(abnormal=False, message=_serving(mount))
    message = f" ({mount.message})" if mount.message else ""
    remedy = REMEDIES.get(mount.state, mount.state)
    seconds = max(0.0, time.time() - mount.since)
    return csi.VolumeCondition(abnormal=True, message=f"for {seconds:.0f} s: {remedy}{message}")


def usage_of(quota: Quota | None) -> list[csi.VolumeUsage]:
    """Return bytes and inodes; zeros if 3FS did not answer, which the condition then reports."""
    if quota is None:
        return [csi.VolumeUsage(unit=csi.VolumeUsage.BYTES)]
    total = quota.bytes_max if quota.bytes_max is not None else quota.bytes_used
    inodes = quota.inodes_max if quota.inodes_max is not None else INODES_SHOWN
    return [
        csi.VolumeUsage(
            unit=csi.VolumeUsage.BYTES,
            total=total,
            used=quota.bytes_used,
            available=max(0, total - quota.bytes_used),
        ),
        csi.VolumeUsage(
            unit=csi.VolumeUsage.INODES,
            total=inodes,
            used=quota.inodes_used,
            available=max(0, inodes - quota.inodes_used),
        ),
    ]


def _serving(mount: MountStatus) -> str:
    if not mount.restarts:
        return "serving"
    return f"serving; its FUSE daemon was replaced {mount.restarts} times"
