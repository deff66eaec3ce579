"""A GlusterFS volume for `bench/storage.py`: three bricks on the disk of the folder, its defaults.

The daemons run in namespaces for mounts and processes: they end with the context, and leave nothing
in `/var`. Needs root, /dev/fuse, and the packages glusterfs-server and glusterfs-client.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_installed", "volume"]

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


@contextmanager
def volume(folder: Path) -> Iterator[Path]:
    """The mounted volume, as a path that is usable outside its namespace.

    Raises:
        RuntimeError: The volume could not be mounted.
    """
    folder.mkdir(parents=True)
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    shell = ["sh", "-c", SCRIPT, "sh", str(folder.resolve())]
    process = subprocess.Popen(
        [*namespaces, *shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "mounted\n":
            raise RuntimeError("GlusterFS does not start; its messages are above")
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Path(f"/proc/{child}/root") / (folder.resolve() / "mount").relative_to("/")
    finally:
        process.kill()
        process.communicate()
