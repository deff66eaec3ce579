"""`flyer-install DIR`: copies the runtime of a training container into a volume of its pod.

    DIR/bin/flyer-launch    runs with any python3 of the image; reports one that is too old
    DIR/lib/flyer/          only `flyer.job`
    DIR/lib/hfreduce/       the collectives, if this image contains them
    DIR/lib/haiscale/       the training layers over them, likewise

Each part is renamed into place, so that an interrupted run leaves no partial copy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["install", "main"]

_USAGE = "usage: flyer-install DIR\n"

# An image may contain another `flyer`: it supplies the modules that are missing here.
_PACKAGE = '''"""`flyer` inside a job: `flyer.job`, and the modules of the image's own `flyer`."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
'''

# Syntax of any Python 3, so that old versions can print the message.
_LAUNCH = """#!/usr/bin/env python3
import os
import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        "flyer-launch: python3 of this image is %d.%d; Fire-Flyer's launcher needs 3.11 or later: "
        "put one first on the image's PATH\\n" % sys.version_info[:2]
    )
    sys.exit(2)
here = os.path.dirname(os.path.abspath(__file__))
library = os.path.join(os.path.dirname(here), "lib")
if sys.path and os.path.abspath(sys.path[0]) == here:
    del sys.path[0]
# Ranks import flyer.job, hfreduce and haiscale, too; the user's entries of the path come first.
paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if library not in paths:
    os.environ["PYTHONPATH"] = os.pathsep.join(paths + [library])
    sys.path.insert(len(paths), library)

from flyer.job.container import main  # noqa: E402

sys.exit(main())
"""


def install(folder: Path) -> list[str]:
    """Fill the folder. Returns the names of the installed packages."""
    library, programs = folder / "lib", folder / "bin"
    for item in (library, programs):
        item.mkdir(parents=True, exist_ok=True)
    _place(Path(__file__).parent, library / "flyer", "job")
    (library / "flyer" / "__init__.py").write_text(_PACKAGE)
    installed = ["flyer.job"]
    for name in ("hfreduce", "haiscale"):  # one distribution
        module_spec = importlib.util.find_spec(name)
        if module_spec is not None and module_spec.origin is not None:
            _place(Path(module_spec.origin).parent, library, name)
            installed.append(name)
    if "hfreduce" in installed:
        _copy_entry_points("hfreduce", library)
    launch = programs / "flyer-launch"
    launch.write_text(_LAUNCH)
    launch.chmod(0o755)
    return installed


def _copy_entry_points(name: str, library: Path) -> None:
    """The package's metadata, by which torch finds the backend."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return
    folder = library / f"{name}-{distribution.version}.dist-info"
    folder.mkdir(exist_ok=True)
    for file in ("METADATA", "entry_points.txt"):
        text = distribution.read_text(file)
        if text is not None:
            (folder / file).write_text(text)


def _place(source: Path, parent: Path, name: str) -> None:
    parent.mkdir(parents=True, exist_ok=True)
    partial, old = parent / f".{name}.partial", parent / f".{name}.old"
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    shutil.copytree(source, partial, ignore=ignored, copy_function=shutil.copyfile)
    for path in [partial, *partial.rglob("*")]:
        path.chmod(0o755 if path.is_dir() or path.suffix == ".so" else 0o644)
    if (parent / name).exists():
        (parent / name).rename(old)
    partial.rename(parent / name)
    shutil.rmtree(old, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `flyer-install`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--help"]:
        sys.stdout.write(_USAGE)
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        sys.stderr.write(_USAGE)
        return 2
    os.umask(0o022)
    try:
        installed = install(Path(words[0]))
    except OSError as error:
        sys.stderr.write(f"flyer-install: {words[0]}: {error}: name a writable folder\n")
        return 1
    sys.stdout.write(f"flyer-install: {', '.join(installed)} in {words[0]}/lib\n")
    return 0
