"""A MooseFS volume with three copies: a master and three chunkservers on the disk of the folder.

Its defaults, except where their files are. The daemons run in namespaces for mounts, processes and
the network: they end with the context, and no port and no service of the machine is used. Needs
root, /dev/fuse, and the packages moosefs-master, moosefs-chunkserver and moosefs-client.

As shipped, a chunkserver does not flush the data of a file (`HDD_FSYNC_BEFORE_CLOSE`), and the
master stores its changes in the background: an `fsync` returns before its data is durable.
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

PACKAGES = "moosefs-master, moosefs-chunkserver, moosefs-client, iproute2"

# A chunkserver refuses a master in 127.0.0.0/8. Files are written with as many copies as there are
# chunkservers, so the script waits until a new file has three.
SCRIPT = r"""
set -eu
folder=$1
host=192.0.2.1
ip link set lo up
ip address add "$host/32" dev lo
mkdir "$folder/master" "$folder/mount"
printf 'MFSM NEW' >"$folder/master/metadata.mfs"
echo '* / rw,maproot=0' >"$folder/exports.cfg"
configure() {
    printf 'WORKING_USER = root\nWORKING_GROUP = root\nDISABLE_OOM_KILLER = 0\n' >"$folder/$1.cfg"
    printf 'DATA_PATH = %s\n' "$folder/$1" >>"$folder/$1.cfg"
}
run() {
    timeout 60 "$@" >"$folder/messages" 2>&1 || { cat "$folder/messages" >&2; exit 1; }
}
configure master
echo "EXPORTS_FILENAME = $folder/exports.cfg" >>"$folder/master.cfg"
run mfsmaster -c "$folder/master.cfg" start
for number in 1 2 3; do
    mkdir "$folder/$number" "$folder/disk-$number"
    echo "$folder/disk-$number" >"$folder/disk-$number.cfg"
    configure "$number"
    printf '%s = %s\n' HDD_CONF_FILENAME "$folder/disk-$number.cfg" MASTER_HOST "$host" \
        CSSERV_LISTEN_PORT "$((29500 + number))" >>"$folder/$number.cfg"
    run mfschunkserver -c "$folder/$number.cfg" start
done
run mfsmount "$folder/mount" -H "$host"
run mfssetgoal -r 3 "$folder/mount"
three_copies() {
    rm -f "$folder/mount/probe"
    echo probe >"$folder/mount/probe"
    sync "$folder/mount/probe"
    mfsfileinfo "$folder/mount/probe" | grep -q 'copy 3'
}
attempts=0
until three_copies 2>/dev/null; do
    attempts=$((attempts + 1))
    [ "$attempts" -lt 60 ] || { echo "MooseFS has fewer than three chunkservers" >&2; exit 1; }
    sleep 1
done
rm "$folder/mount/probe"
echo mounted
exec cat >/dev/null
"""


def is_installed() -> bool:
    """Whether its programs are on this machine."""
    names = ("mfsmaster", "mfschunkserver", "mfsmount", "mfssetgoal", "mfsfileinfo", "ip")
    return all(shutil.which(name) for name in (*names, "unshare"))


def volume(folder: Path) -> AbstractContextManager[Volume]:
    """The mounted volume."""
    return mounted(SCRIPT, folder, "MooseFS", "--net")
