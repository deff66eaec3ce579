"""A Containerfile built by Debian's buildah: no daemon, no registry, a store in a scratch folder.

The base images are local stand-ins (`images.stand_ins`). Packages come from the host's
sources: its certificates and its settings of apt, pip, uv and cargo are mounted into the build
while it runs and are not part of any layer.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from images.commands import ImageError, run
from images.packages import ROOT, SOURCES
from images.stand_ins import STAND_INS, stand_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from images.contents import Image

__all__ = [
    "Store", "containerfile", "entry_points", "host_settings", "host_variables",
    "rust_version", "why_not",
]  # fmt: skip

BUILD_SECONDS = 3600.0  # both Rust builds, on two slow cores
START_SECONDS = 60.0
PULL_SECONDS = 1200.0  # a gigabyte of toolchain, during other builds

# Host variables that configure the indexes of package managers.
PASSED_ON = re.compile(r"(PIP|UV|CARGO|RUSTUP)_[A-Z_]*|SSL_CERT_(FILE|DIR)", re.ASCII)
# Set by the Containerfiles themselves, or paths of the host.
NOT_PASSED_ON = {"CARGO_HOME", "CARGO_TARGET_DIR", "RUSTUP_HOME", "UV_CACHE_DIR", "UV_LINK_MODE",
                 "UV_PYTHON_DOWNLOADS", "UV_PROJECT_ENVIRONMENT", "PIP_FIND_LINKS"}  # fmt: skip


def why_not() -> str:
    """The reason why this machine cannot build the Containerfiles; empty if it can."""
    if os.geteuid() != 0:
        return "building Containerfiles needs root (chroot, mounts)"
    for command in ("buildah", "mmdebstrap", "rustup"):
        if shutil.which(command) is None:
            return f"building Containerfiles needs {command}, which is not installed"
    return ""


def containerfile(image: Image) -> Path:
    """The file that users build this image from."""
    return ROOT / "images" / f"{image.name}.Containerfile"


def rust_version() -> str:
    """The toolchain that the Containerfiles install."""
    for path in sorted((ROOT / "images").glob("*.Containerfile")):
        if match := re.search(r"^ARG RUST_VERSION=(\S+)$", path.read_text(), re.MULTILINE):
            return match[1]
    raise ImageError("no Containerfile has a line `ARG RUST_VERSION=…`")


def entry_points(image: Image) -> list[str]:
    """The commands that the wheels of an image install."""
    names: list[str] = []
    for package in image.packages:
        folder, _ = SOURCES[package.partition("[")[0]]
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        names += project["scripts"]
    return sorted(set(names) - set(image.not_started))


def host_settings() -> list[str]:
    """Flags of `buildah build` that mount the files of the host's package managers."""
    home = Path.home()
    read_only = {
        Path("/etc/ssl/certs/ca-certificates.crt"): "/etc/ssl/certs/ca-certificates.crt",
        Path("/etc/apt"): "/etc/apt",
        Path("/usr/share/keyrings"): "/usr/share/keyrings",
        Path("/etc/pip.conf"): "/etc/pip.conf",
        home / ".config/pip/pip.conf": "/root/.config/pip/pip.conf",
        home / ".config/uv/uv.toml": "/root/.config/uv/uv.toml",
        home / ".cargo/config.toml": "/usr/local/cargo/config.toml",
    }
    # Downloads are shared with the host's: cargo and uv lock their caches.
    shared = {
        home / ".cargo/registry": "/usr/local/cargo/registry",
        home / ".cache/uv": "/root/.cache/uv",
    }
    flags = [f"--volume={path}:{at}:ro" for path, at in read_only.items() if path.exists()]
    flags += [f"--volume={path}:{at}:rw" for path, at in shared.items() if path.exists()]
    return flags


def host_variables() -> list[str]:
    """Names of the host variables that configure the indexes of package managers."""
    return sorted(n for n in os.environ if PASSED_ON.fullmatch(n) and n not in NOT_PASSED_ON)


@dataclass(frozen=True)
class Store:
    """Images of one run, in a separate folder."""

    folder: Path

    def prepare(self, cache: Path) -> None:
        """Loads the replacements of the base images."""
        for base in STAND_INS:
            archive = stand_in(base, cache, rust_version())
            pulled = self._buildah(["pull", "--quiet", f"oci-archive:{archive}"], PULL_SECONDS)
            # Not `build --env`, which sets the image's environment but not that of RUN.
            container = self._buildah(["from", "--pull-never", pulled.split()[-1]], PULL_SECONDS)
            name = container.split()[-1]
            if variables := host_variables():
                flags = [f"--env={variable}" for variable in variables]  # the values are its own
                self._buildah(["config", *flags, name], PULL_SECONDS)
            self._buildah(["commit", "--quiet", "--rm", name, base.reference], PULL_SECONDS)

    def build(self, image: Image) -> str:
        """Builds all stages; the name of the image in this store."""
        name = f"localhost/fireflyer/{image.name}:built"
        command = ["build", "--isolation=chroot", "--pull-never", "--network=host"]
        command.append("--layers=false")
        command += [f"--build-arg={base.argument}={base.reference}" for base in STAND_INS]
        command += [*host_settings(), f"--file={containerfile(image)}", f"--tag={name}", str(ROOT)]
        self._buildah(command, BUILD_SECONDS)
        return name

    def start(self, image: Image, name: str) -> Iterator[str]:
        """Starts every entry point once with `--help`, as the image's user; yields each."""
        container = self._buildah(["from", "--pull-never", name], PULL_SECONDS).split()[-1]
        try:
            for command in entry_points(image):
                line = ["run", "--isolation=chroot", "--network=host", container, "--", command]
                self._buildah([*line, "--help"], START_SECONDS)
                yield command
        finally:
            self._buildah(["rm", container], PULL_SECONDS)

    def remove(self) -> None:
        """Deletes all images and containers of this store."""
        self._buildah(["rm", "--all"], PULL_SECONDS)
        self._buildah(["rmi", "--all", "--force"], PULL_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _buildah(self, arguments: Sequence[str], seconds: float) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        roots = [f"--root={self.folder / 'root'}", f"--runroot={self.folder / 'run'}"]
        command = ["buildah", *roots, "--storage-driver=overlay", *arguments]
        return run(command, f"buildah {' '.join(arguments)} failed", timeout_seconds=seconds)
