"""The pause image: one static program, a few kilobytes of source, no registry."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

from images.oci import Config, Layer, write_archive

__all__ = ["PAUSE_IMAGE", "pause_archive"]

PAUSE_IMAGE = "docker.io/fireflyer/pause:test"

SOURCE = Path(__file__).with_name("pause.c")


def pause_archive(folder: Path) -> Path:
    """The archive of the pause image in `folder`; built if its source is newer than it."""
    digest = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    archive = folder / f"pause-{digest}.tar"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch_name:
            scratch = Path(scratch_name)
            program = scratch / "pause"
            subprocess.run(["cc", "-Os", "-static", "-s", "-o", program, SOURCE], check=True)
            with tarfile.open(scratch / "layer.tar", "w") as layer:
                layer.add(program, "pause")
            compressed = Layer.compress(scratch / "layer.tar", scratch / "layer.tar.gz")
            config = Config(entrypoint=("/pause",), user="65535:65535")
            write_archive(archive, PAUSE_IMAGE, [compressed], config)
    return archive
