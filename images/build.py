"""Builder of OCI image archives without a daemon: `python -m images.build [IMAGE…]`.

An image is the base layer and one layer with the contents listed in `images.contents`. Archives
are kept in the user's cache folder under a hash of all their inputs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path

from images import packages
from images.base import base_layer, python_version
from images.commands import ImageError
from images.contents import IMAGES, Image
from images.oci import Config, Layer, write_archive
from programs import binaries

__all__ = ["archive", "main"]

# Nothing newer than this is in a layer's timestamps: the same content gives the same bytes.
EPOCH = 1_700_000_000


def main() -> int:
    """Builds the named images, or all; prints the path and size of each."""
    images = {image.name: image for image in IMAGES}
    parser = argparse.ArgumentParser(prog="python -m images.build", description=__doc__)
    parser.add_argument("image", nargs="*", help=f"of: {', '.join(images)} (default: all)")
    names = parser.parse_args().image or list(images)
    if unknown := [name for name in names if name not in images]:
        parser.error(f"no image called {', '.join(unknown)}; there are {', '.join(images)}")
    try:
        for name in names:
            path = archive(images[name])
            size_mb = path.stat().st_size / 1e6
            print(f"{images[name].reference}  {size_mb:.1f} MB  {path}")
    except (ImageError, binaries.BinaryError) as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


def archive(image: Image) -> Path:
    """The archive of an image: from the cache, or newly built."""
    cache = binaries.cache() / "images"
    base = base_layer(cache)
    programs = binaries.require(*image.programs)
    parts = {
        "image": asdict(image),
        "base": base.digest,
        "programs": [str(path) for path in programs.values()],
        "packages": [packages.source_key(p.partition("[")[0]) for p in image.packages],
        "builder": [Path(p.__file__ or "").read_text() for p in (packages, sys.modules[__name__])],
        "lock": hashlib.sha256((packages.ROOT / "uv.lock").read_bytes()).hexdigest(),
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    target = cache / f"{image.name}-{key}.tar"
    if not target.exists():
        print(f"images: building {image.name}", flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            layers = [base, *_own_layer(image, programs, base, Path(scratch))]
            write_archive(target, image.reference, layers, _config(image))
    return target


def _own_layer(image: Image, programs: dict[str, Path], base: Layer, scratch: Path) -> list[Layer]:
    root = scratch / "root"
    if image.packages:
        cache = binaries.cache()
        packages.install(
            root, image.packages, python_version(base), cache, dependencies=image.dependencies
        )
        _compile(root, base, scratch)
    for name, path in programs.items():
        (root / "usr" / "local" / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, root / "usr" / "local" / "bin" / name)
    if not root.exists():
        return []
    with tarfile.open(scratch / "layer.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(root, ".", filter=_plain)
    return [Layer.compress(scratch / "layer.tar", scratch / "layer.tar.gz")]


def _compile(root: Path, base: Layer, scratch: Path) -> None:
    """Compiles to bytecode with the image's own Python; containers cannot write it themselves."""
    system = scratch / "system"
    system.mkdir()
    with tarfile.open(base.path) as tar:
        tar.extractall(system, filter="fully_trusted")
    inside = system / packages.FOLDER
    inside.parent.mkdir(parents=True)
    (root / packages.FOLDER).rename(inside)
    compiler = ["python3", "-m", "compileall", "-q", "--invalidation-mode=unchecked-hash"]
    subprocess.run(["chroot", system, *compiler, f"/{packages.FOLDER}"], check=True)
    inside.rename(root / packages.FOLDER)


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = EPOCH
    return info


def _config(image: Image) -> Config:
    return Config(
        entrypoint=image.entrypoint or tuple(f"/usr/local/bin/{name}" for name in image.programs),
        environment={
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": f"/{packages.FOLDER}",
            "PYTHONUNBUFFERED": "1",
        },
        user=f"{image.user}:{image.user}",
        labels={"org.opencontainers.image.description": image.purpose},
    )


if __name__ == "__main__":
    raise SystemExit(main())
