"""Containerfile check: builds them and starts their programs: `python -m images.check [IMAGE…]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from images.commands import ImageError
from images.containerfiles import Store, why_not
from images.contents import IMAGES
from images.packages import ROOT
from programs import binaries

__all__ = ["main"]


def main() -> int:
    """Builds the named images, or all that have a Containerfile; returns 1 if one fails."""
    images = {image.name: image for image in IMAGES if image.packages}
    parser = argparse.ArgumentParser(prog="python -m images.check", description=__doc__)
    parser.add_argument("image", nargs="*", help=f"one of {', '.join(images)} (default: all)")
    names = parser.parse_args().image or list(images)
    if unknown := [name for name in names if name not in images]:
        parser.error(f"unknown image {', '.join(unknown)}: expected one of {', '.join(images)}")
    if reason := why_not():
        print(f"images: {reason}", file=sys.stderr)
        return 1
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="containerfiles-") as folder:
        store = Store(Path(folder))
        try:
            store.prepare(binaries.cache() / "images")
            for name in names:
                started = time.monotonic()
                build = store.build(images[name])
                commands = list(store.start(images[name], build))
                seconds = time.monotonic() - started
                print(
                    f"{name}: built in {seconds:.0f} s; starts: {', '.join(commands)}", flush=True
                )
        except (ImageError, binaries.BinaryError) as error:
            print(f"images: {error}", file=sys.stderr)
            return 1
        finally:
            store.remove()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
