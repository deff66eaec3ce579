"""Base layer of every image: a minimal root file system of the host's Debian or Ubuntu.

mmdebstrap's `extract` variant unpacks the packages and their dependencies without running their
scripts: no package manager, no Perl, no shell history of an installation. The parts
of their results that programs need are written here: two users and a few folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from images.commands import ImageError, run
from images.contents import BASE_PACKAGES, NON_ROOT
from images.debian import root_folder, suite
from images.oci import Layer

__all__ = ["base_layer", "python_version"]

# Files unused in containers: documentation, translations, tests of the standard library.
EXCLUDED = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    "/usr/share/info/*",
    "/usr/share/locale/*",
    "/usr/share/lintian/*",
    "/usr/share/bash-completion/*",
    "/usr/lib/python3*/ensurepip/*",
    "/usr/lib/python3*/idlelib/*",
    "/usr/lib/python3*/lib2to3/*",
    "/usr/lib/python3*/test/*",
)

# Creates in the root folder `$1` the files that the packages' scripts would create.
FINISH = f"""set -eu
cd "$1"
umask 022
printf '%s\\n' root:x:0:0:root:/root:/bin/sh \\
    nonroot:x:{NON_ROOT}:{NON_ROOT}:nonroot:/home/nonroot:/usr/sbin/nologin > etc/passwd
printf '%s\\n' root:x:0: tty:x:5: nonroot:x:{NON_ROOT}: > etc/group
mkdir -p home/nonroot proc sys dev run tmp
chown {NON_ROOT}:{NON_ROOT} home/nonroot
chmod 1777 tmp
rm -rf var/lib/apt var/lib/dpkg var/cache/* var/log/*
ldconfig -r .
chroot . /bin/sh -c 'python3 -m compileall -q /usr/lib/python3*'
"""


def base_layer(cache: Path) -> Layer:
    """The base layer from the cache, or newly made (half a minute, with a Debian mirror)."""
    parts = [suite(), BASE_PACKAGES, EXCLUDED, FINISH]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    target = cache / f"base-{suite()}-{key}.tar.gz"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _make(target)
    return Layer.load(target)


def python_version(layer: Layer) -> str:
    """Python version of the base layer, for example 3.11."""
    command = ["tar", "--list", "--gzip", f"--file={layer.path}", "--wildcards"]
    names = run([*command, "*/usr/bin/python3.[0-9]*"], "the base layer has no Python").split()
    return names[0].rpartition("python")[2]


def _make(target: Path) -> None:
    if shutil.which("mmdebstrap") is None or os.geteuid() != 0:
        raise ImageError(
            "the base layer needs root and Debian's mmdebstrap; apt install mmdebstrap"
        )
    print(f"images: making the base layer from {suite()}", flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        root, archive = Path(scratch) / "root", Path(scratch) / "base.tar"
        root_folder(root, BASE_PACKAGES, "extract", EXCLUDED)
        run(["sh", "-c", FINISH, "finish", str(root)], "finishing the base layer failed")
        tar = ["tar", "--create", "--sort=name", "--numeric-owner", f"--file={archive}"]
        run([*tar, f"--directory={root}", "."], "packing the base layer failed")
        layer = Layer.compress(archive, Path(scratch) / "layer.tar.gz")
        layer.path.rename(target)
