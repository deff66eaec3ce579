"""Use and condition of a mounted volume, as the specification wants them. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from threefs.csi.proto import csi_pb2 as csi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threefs.client import Quota
    from threefs.csi.holder_client import MountedAt, Served

__all__ = ["condition_of", "usage_of"]

INODES_SHOWN = 1 << 40
"""Shown where there is no limit."""

REMEDIES = {
    "starting": "its FUSE daemon starts; programs wait until it serves",
    "stopped": "its FUSE daemon is stopped by a signal; continue it",
    "down": "its FUSE daemon ended and is being replaced; programs wait until it serves",
    "ended": "its FUSE daemon was ended; delete the pod and let it be made anew",
}


def condition_of(mounted: MountedAt, held: Sequence[Served]) -> csi.VolumeCondition:
    """Normal while a daemon serves; otherwise what is the matter and what to do."""
    served = next((one for one in held if one.device == mounted.device), None)
    if served is None:
        return csi.VolumeCondition(
            abnormal=True,
            message="the holder that kept this mount has died; delete the pods that use the "
            "volume on this node, so that it is mounted anew",
        )
    if served.state == "serving":
        return csi.VolumeCondition(abnormal=False, message=_steady(served))
    told = f" ({served.message})" if served.message else ""
    remedy = REMEDIES.get(served.state, served.state)
    seconds = max(0.0, time.time() - served.since)
    return csi.VolumeCondition(abnormal=True, message=f"for {seconds:.0f} s: {remedy}{told}")


def usage_of(quota: Quota | None) -> list[csi.VolumeUsage]:
    """Bytes and inodes; zeros when 3FS could not be asked, which the condition then says."""
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


def _steady(served: Served) -> str:
    if not served.restarts:
        return "serving"
    return f"serving; its FUSE daemon was replaced {served.restarts} times"
