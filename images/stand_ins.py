"""Local replacements for the base images of the Containerfiles, for machines without a registry.

Each is the host's Debian or Ubuntu with only the contents of the official image: `python` has no
compiler, `rust` has no Python. A Containerfile that builds on them declares all its dependencies.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from images.commands import ImageError, run
from images.debian import root_folder, suite
from images.oci import Config, Layer, write_archive

__all__ = ["STAND_INS", "StandIn", "stand_in"]

FORMAT = 2
"""Version of the archives; archives of other versions are rebuilt."""
PATH = "/usr/local/cargo/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

# The official image has its own interpreter below /usr/local, which pip may write to.
PYTHON_FINISH = """
ln -s ../../bin/python3 usr/local/bin/python
ln -s ../../bin/pip3 usr/local/bin/pip
rm -f usr/lib/python3*/EXTERNALLY-MANAGED
"""

# Extracted by rustup on the host into the image's folders; rustup in the image finds it there.
RUST_FINISH = """
export RUSTUP_HOME="$PWD/usr/local/rustup" CARGO_HOME="$PWD/usr/local/cargo"
mkdir -p "$CARGO_HOME/bin"
rustup --quiet toolchain install --profile minimal --no-self-update "$RUST_VERSION"
cp "$(command -v rustup)" "$CARGO_HOME/bin/rustup"
for name in cargo rustc rustdoc; do ln -s rustup "$CARGO_HOME/bin/$name"; done
rm -rf "$RUSTUP_HOME/downloads" "$RUSTUP_HOME/tmp" "$CARGO_HOME/registry"
"""


@dataclass(frozen=True)
class StandIn:
    """A base image: Debian packages, and a script that runs in its root folder on the host."""

    argument: str  # of the Containerfiles
    packages: tuple[str, ...]
    finish: str
    environment: tuple[tuple[str, str], ...] = ()
    host_commands: tuple[str, ...] = ()  # that `finish` runs

    @property
    def reference(self) -> str:
        """The name in the local store."""
        return f"localhost/fireflyer-stand-in/{self.argument.lower()}:local"


STAND_INS = (
    StandIn("BASE", ("ca-certificates", "python3", "python3-pip", "python3-venv"), PYTHON_FINISH),
    StandIn(
        "RUST",
        ("ca-certificates", "gcc", "libc6-dev"),
        RUST_FINISH,
        environment=(("RUSTUP_HOME", "/usr/local/rustup"), ("CARGO_HOME", "/usr/local/cargo")),
        host_commands=("rustup",),
    ),
)


def stand_in(base: StandIn, cache: Path, rust_version: str) -> Path:
    """The OCI archive of a replacement: cached, or built in one or two minutes."""
    programs = ("mmdebstrap", *base.host_commands)
    missing = [command for command in programs if shutil.which(command) is None]
    if missing or os.geteuid() != 0:
        reason = f"{', '.join(missing)} (not found)" if missing else "root"
        raise ImageError(f"the local base image {base.reference} needs {reason}")
    parts = [FORMAT, suite(), rust_version, asdict(base)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    target = cache / f"stand-in-{base.argument.lower()}-{key}.tar"
    if not target.exists():
        print(f"images: making the local base image {base.reference}", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            _make(base, target, Path(scratch), rust_version)
    return target


def _make(base: StandIn, target: Path, scratch: Path, rust_version: str) -> None:
    root, tar = scratch / "root", scratch / "root.tar"
    root_folder(root, base.packages, "minbase")
    script = f"set -eu\ncd '{root}'\n{base.finish}"
    environment = {**os.environ, "RUST_VERSION": rust_version}
    run(["sh", "-c", script], f"finishing {base.reference} failed", environment=environment)
    create = ["tar", "--create", "--sort=name", "--numeric-owner", f"--file={tar}"]
    pack = [*create, f"--directory={root}", "--exclude=./dev/*", "."]
    run(pack, f"packing {base.reference} failed")
    layer = Layer.compress(tar, scratch / "layer.tar.gz", level=1)
    config = Config(environment={"PATH": PATH, **dict(base.environment)})
    write_archive(target, base.reference, [layer], config)
