"""Guard process: removes a cluster when its user exits for any reason, `kill -9` included.

A pipe connects the guard and the user's process; the kernel closes the user's end on exit.
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
DOWN_DEADLINE_S = 600.0  # on a loaded machine


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """On leaving, or when this process dies, the cluster of this folder is taken down."""
    guard = subprocess.Popen(
        [sys.executable, "-m", "testcluster.guard", str(folder.resolve())],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,  # signals to the user's process group must not end the guard
    )
    try:
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        if guard.wait(DOWN_DEADLINE_S):
            down(folder)  # reports why the guard failed


def main() -> None:
    """Waits for the end of standard input, then takes the cluster of argument 1 down."""
    folder = Path(sys.argv[1])
    sys.stdin.buffer.read()
    down(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # if the user created it only for the cluster


if __name__ == "__main__":
    main()
