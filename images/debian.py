"""Root folders of the host's Debian or Ubuntu release, made by mmdebstrap."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Literal

from images.commands import run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["root_folder", "suite"]


def suite() -> str:
    """The release of the host's distribution, as its mirrors name it."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "bookworm")


def root_folder(
    root: Path,
    packages: Sequence[str],
    variant: Literal["extract", "minbase"],
    excluded: Sequence[str] = (),
) -> None:
    """Installs packages with their dependencies into `root`, except files that match `excluded`.

    `extract` only unpacks them; `minbase` also runs their scripts and adds a package manager.
    """
    command = ["mmdebstrap", "--mode=root", f"--variant={variant}", "--format=directory"]
    command += ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in excluded]
    command += [f"--include={','.join(packages)}", suite(), str(root)]
    run(command, "mmdebstrap failed (is a Debian mirror reachable?)")
