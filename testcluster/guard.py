"""Takes a cluster down once whoever uses it is gone, however it went: `kill -9` too.

A process beside the user's, with a pipe between them; the kernel closes the user's end of it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from testcluster.down import down

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["guarded"]

ROOT = Path(__file__).parents[1]
DOWN_DEADLINE_S = 600.0  # on a machine that does other things too


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """On leaving, or when this process dies, the cluster of this folder is taken down."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "testcluster.guard", str(folder.resolve())],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,  # what is meant to end the user's group must not end this
    )
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        if guard.wait(DOWN_DEADLINE_S):
            down(folder)  # tells why the guard could not


def main() -> None:
    """Waits for the end of standard input, then takes the cluster of argument 1 down."""
    folder = Path(sys.argv[1])
    sys.stdin.buffer.read()
    down(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # where the user made it for the cluster alone


if __name__ == "__main__":
    main()
