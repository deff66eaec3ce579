"""Base layer of every image: a minimal root file system of the host's Debian or Ubuntu.

mmdebstrap's `extract` variant unpacks the packages and their dependencies without running their
scripts: no package manager, no Perl, no shell history of an installation. The parts
of their results that programs need are written here: two users and a few folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from images.contents import BASE_PACKAGES, NON_ROOT
from images.oci import Layer

__all__ = ["ImageError", "base_layer", "python_version", "suite"]

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


class ImageError(Exception):
    """An image could not be built; the message has the failed step and the remedy."""


def base_layer(cache: Path) -> Layer:
    """The base layer from the cache, or newly made (half a minute, with a Debian mirror)."""
    parts = [suite(), BASE_PACKAGES, EXCLUDED, FINISH]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    target = cache / f"base-{suite()}-{key}.tar.gz"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _make(target)
    return Layer.load(target)


def suite() -> str:
    """The release of the host's distribution, as its mirrors name it."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "bookworm")


def python_version(layer: Layer) -> str:
    """The version (3.11, say) of the Python in the base layer."""
    names = subprocess.run(
        [
            "tar",
            "--list",
            "--gzip",
            "--file",
            layer.path,
            "--wildcards",
            "*/usr/bin/python3.[0-9]*",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return names[0].rpartition("python")[2]


def _make(target: Path) -> None:
    if shutil.which("mmdebstrap") is None or os.geteuid() != 0:
        raise ImageError(
            "the base layer needs root and Debian's mmdebstrap; apt install mmdebstrap"
        )
    print(f"images: making the base layer from {suite()}", flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        root, archive = Path(scratch) / "root", Path(scratch) / "base.tar"
        command = [
            "mmdebstrap",
            "--mode=root",
            "--variant=extract",
            "--format=directory",
            f"--include={','.join(BASE_PACKAGES)}",
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in EXCLUDED),
            suite(),
            str(root),
        ]
        _run(command, "mmdebstrap failed (is a Debian mirror reachable?)")
        _run(["sh", "-c", FINISH, "finish", str(root)], "finishing the base layer failed")
        tar = ["tar", "--create", "--sort=name", "--numeric-owner", f"--file={archive}"]
        _run([*tar, f"--directory={root}", "."], "packing the base layer failed")
        layer = Layer.compress(archive, Path(scratch) / "layer.tar.gz")
        layer.path.rename(target)


def _run(command: list[str], failure: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = "\n".join(result.stderr.splitlines()[-8:])
        raise ImageError(f"{failure}:\n{last}")
