"""Removal of volumes: at once without snapshots, otherwise with the last one.

Users of Kubernetes delete a claim and restore it from a snapshot later, so snapshots outlive their
volume. What snapshots show stays in the directory of the volume, which has no record any more.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

from threefs.csi.errors import FailedPrecondition
from threefs.csi.volumes.snapshots import Snapshots, stored_snapshots
from threefs.csi.volumes.volumes import DATA, DELETED, RECORD
from threefs.errors import DirectoryNotEmpty, NoAttribute, NotADirectory, NotFound

if TYPE_CHECKING:
    from threefs.csi.volumes.clusters import Directories
    from threefs.csi.volumes.volume_id import VolumeId
    from threefs.csi.volumes.volumes import Volumes

__all__ = ["COPY_PREFIX", "discard", "remove_rest", "remove_volume"]

REMOVED = "/.csi/removed"
COPY_PREFIX = "copy-"
"""Of the names of snapshots that are copied to a clone, and then removed."""
NAMES_SHOWN_MAX = 5


def remove_volume(volumes: Volumes, volume: VolumeId) -> None:
    """Remove a volume, or the rest of an unfinished creation; its snapshots stay."""
    files = volumes.files
    existing = volumes.find(volume)
    if existing is None:
        _remove_unfinished(volumes, volume)
        return
    try:
        files.remove_tree(volume.path, missing_ok=True)
    except DirectoryNotEmpty:
        _refuse_foreign(volumes, volume)
        files.setxattr(volume.path, DELETED, existing.record())
        with suppress(NoAttribute):
            files.removexattr(volume.path, RECORD)
        remove_rest(volumes, volume)


def remove_rest(volumes: Volumes, volume: VolumeId) -> None:
    """Remove what no snapshot shows of a removed volume; nothing of others. Can be repeated."""
    if volumes.attribute(volume, DELETED) is None or volumes.attribute(volume, RECORD) is not None:
        return
    files = volumes.files
    with suppress(NotFound, NotADirectory):
        if stored_snapshots(files, volume):
            files.keep_removed(volume.path, 0)
            files.remove_tree(f"{volume.path}/{DATA}", missing_ok=True)
        else:
            discard(files, volume.path)


def discard(files: Directories, path: str) -> None:
    """Remove a directory with a quota whose last snapshot may not be freed yet.

    It is refused until then, but not with a directory above it.
    """
    try:
        files.remove_tree(path, missing_ok=True)
    except DirectoryNotEmpty:
        files.make_directory("/.csi", 0o755, exist_ok=True)
        files.make_directory(REMOVED, 0o700, exist_ok=True)
        above = f"{REMOVED}/{uuid.uuid4().hex}"
        files.make_directory(above, 0o700)
        with suppress(NotFound):
            files.rename(path, f"{above}/volume")
        # With what an interrupted removal has left.
        for name in files.listdir(REMOVED):
            files.remove_tree(f"{REMOVED}/{name}", missing_ok=True)


def _remove_unfinished(volumes: Volumes, volume: VolumeId) -> None:
    if volumes.attribute(volume, DELETED) is not None:
        remove_rest(volumes, volume)
        return
    # A directory without a record is removed only if it is as empty as `create` leaves it, with its
    # quota. Foreign files stay.
    if volume.parent not in volumes.parents():
        return
    files = volumes.files
    with suppress(NotFound, NotADirectory, DirectoryNotEmpty):
        if files.listdir(volume.path) == [DATA]:
            files.rmdir(f"{volume.path}/{DATA}")
        files.rmdir(volume.path)


def _refuse_foreign(volumes: Volumes, volume: VolumeId) -> None:
    """Refuse to remove a volume with snapshots that no call of Kubernetes would ever remove."""
    known = {
        each.stored_name for each in Snapshots(volumes.cluster, volumes.files).of_volume(volume)
    }
    foreign = [
        each.name
        for each in stored_snapshots(volumes.files, volume)
        if each.name not in known and not each.name.startswith(COPY_PREFIX)
    ]
    if foreign:
        named = ", ".join(f"`{name[:64]}`" for name in foreign[:NAMES_SHOWN_MAX])
        raise FailedPrecondition(
            f"volume `{volume}` has {len(foreign)} snapshots that were not made by a "
            f"VolumeSnapshot: {named}; remove them with `threefs snapshot remove {volume.path} "
            "NAME`"
        )
