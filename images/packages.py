"""Python layer of an image: the project's wheels and their dependencies from the lock file.

Everything goes into one folder, with a small program for each entry point: no virtual
environment, no installer, no compiler in the image.
"""

from __future__ import annotations

import configparser
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from images.commands import run

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FOLDER", "install", "source_key", "wheel"]

ROOT = Path(__file__).parents[1]
UV = ROOT / "build" / "tools" / "bin" / "uv"

# Where packages live in an image; PYTHONPATH names it.
FOLDER = "opt/fire-flyer/lib"

# Distribution → its folder in the workspace, and the other inputs of its wheel.
SOURCES = {
    "flyer": ("operator", ()),
    "flyer-node": ("deviceplugin", ()),
    "hfreduce": ("collectives/python", ("collectives/crates", "fabric", "Cargo.lock")),
    "threefs": ("csi-3fs/python", ("csi-3fs/crates", "fabric", "Cargo.lock")),
}

LAUNCHER = """#!/usr/bin/python3
import sys

from {module} import {name}

sys.exit({call}())
"""


def install(
    root: Path, requirements: Sequence[str], python: str, cache: Path, *, dependencies: bool
) -> None:
    """Installs these workspace packages (with their extras) under `root`."""
    target = root / FOLDER
    wheels = []
    for requirement in requirements:
        name, _, extras = requirement.rstrip("]").partition("[")
        wheels.append(wheel(name, cache))
        if dependencies:
            _install_locked(target, name, [e for e in extras.split(",") if e], python)
    _pip(target, python, ["--no-deps", *map(str, wheels)])
    shutil.rmtree(target / "bin", ignore_errors=True)  # with this machine's paths in them
    (target / ".lock").unlink(missing_ok=True)
    for entry_points in target.glob("*.dist-info/entry_points.txt"):
        _write_launchers(entry_points, root / "usr" / "local" / "bin")


def wheel(name: str, cache: Path) -> Path:
    """The wheel of a package of the workspace, built once for each state of its sources."""
    folder, _ = SOURCES[name]
    target = cache / "wheels" / f"{name}-{source_key(name)}"
    if not target.exists():
        print(f"images: building the wheel of {name}", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            out = Path(scratch) / "out"
            _uv("build", "--quiet", "--wheel", f"--out-dir={out}", str(ROOT / folder))
            try:
                out.rename(target)
            except OSError:
                if not target.exists():
                    raise
                # A concurrent build of the same sources has finished: use its wheel.
    (wheel_path,) = target.glob("*.whl")
    return wheel_path


def source_key(name: str) -> str:
    """A digest of all files that the package's wheel is built from."""
    folder, paths = SOURCES[name]
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard", "--", folder, *paths]
    listed = run(command, f"listing the sources of {name} failed")
    digest = hashlib.sha256()
    for path in sorted(filter(None, listed.split("\0"))):
        file = ROOT / path
        if "/tests/" not in path and file.is_file():
            digest.update(path.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _install_locked(target: Path, name: str, extras: list[str], python: str) -> None:
    """The package's dependencies, at the versions of uv.lock."""
    options = ["--quiet", "--frozen", "--no-dev", "--no-emit-workspace", "--no-hashes"]
    options += ["--package", name, *(f"--extra={extra}" for extra in extras)]
    lines = _uv("export", *options, "--no-annotate", "--no-header")
    requirements = [line for line in lines.splitlines() if line and not line.startswith("#")]
    if requirements:
        _pip(target, python, ["--no-deps", *(r.partition(" ;")[0].strip() for r in requirements)])


def _pip(target: Path, python: str, arguments: list[str]) -> None:
    options = ["--quiet", "--target", str(target), "--python-version", python]
    _uv("pip", "install", *options, "--only-binary=:all:", "--link-mode=copy", *arguments)


def _write_launchers(entry_points: Path, folder: Path) -> None:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(entry_points)
    if not parser.has_section("console_scripts"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    for command, target in parser.items("console_scripts"):
        module, _, call = target.partition(":")
        text = LAUNCHER.format(module=module, name=call.partition(".")[0], call=call)
        (folder / command).write_text(text)
        (folder / command).chmod(0o755)


def _uv(*arguments: str) -> str:
    return run([str(UV), *arguments], f"uv {' '.join(arguments)} failed", folder=ROOT)
