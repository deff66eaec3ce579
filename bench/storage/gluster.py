"""A GlusterFS volume: three bricks on the disk of the folder, its defaults.

The daemons run in namespaces for mounts and processes: they end with the context, and leave nothing
in `/var`. Needs root, /dev/fuse, and the packages glusterfs-server and glusterfs-client.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from bench.storage.namespaces import mounted

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from bench.storage.namespaces import Volume

__all__ = ["PACKAGES", "is_installed", "volume"]

PACKAGES = "glusterfs-server, glusterfs-client"

# A local brick is not accepted by the name `localhost`.
SCRIPT = r"""
set -eu
folder=$1
for state in /var/lib/glusterd /var/run/gluster /var/log/glusterfs; do
    mkdir -p "$state"
    mount -t tmpfs none "$state"
done
mkdir "$folder/1" "$folder/2" "$folder/3" "$folder/mount"
glusterd
host=$(hostname)
timeout 60 sh -c "until gluster --mode=script pool list >/dev/null 2>&1; do sleep 0.1; done"
timeout 60 gluster --mode=script volume create bench replica 3 \
    "$host:$folder/1" "$host:$folder/2" "$host:$folder/3" force >/dev/null
timeout 60 gluster --mode=script volume start bench >/dev/null
timeout 60 mount -t glusterfs "$host:/bench" "$folder/mount"
echo mounted
exec cat >/dev/null
"""


def is_installed() -> bool:
    """Whether its programs are on this machine."""
    return all(shutil.which(name) for name in ("glusterd", "gluster", "mount.glusterfs", "unshare"))


def volume(folder: Path) -> AbstractContextManager[Volume]:
    """The mounted volume."""
    return mounted(SCRIPT, folder, "GlusterFS")
