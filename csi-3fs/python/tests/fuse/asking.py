"""File system calls whose results can be compared with those of another file system."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

USER, GROUP, OTHER_GROUP = 4711, 4712, 4713


def tried(function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Return the result, or the name of the errno."""
    try:
        result = function(*arguments, **more)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return result if isinstance(result, (int, str, bytes, bool)) else None


def opened(path: Path | str, flags: int, mode: int = 0o644) -> Any:
    """Return whether the path can be opened; it is closed immediately."""

    def attempt() -> str:
        os.close(os.open(path, flags, mode))
        return "opened"

    return tried(attempt)


def touch(path: Path, content: bytes = b"") -> Path:
    path.write_bytes(content)
    path.chmod(0o644)
    return path


def file_state(path: Path) -> tuple[Any, ...]:
    """The attributes of an inode that must be equal."""
    info = path.lstat()
    size = info.st_size if not stat.S_ISDIR(info.st_mode) else -1
    links = info.st_nlink if not stat.S_ISDIR(info.st_mode) else -1
    return (oct(info.st_mode), info.st_uid, info.st_gid, size, links)


def as_user(at: Path, code: str, *groups: int) -> str:
    """Run Python as an unprivileged user in a directory; returns its output."""
    # It starts as root, which can read this interpreter and its modules in any folder.
    program = (
        "import errno, fcntl, os, sys\n"
        f"os.setgroups({list(groups)}); os.setgid({GROUP}); os.setuid({USER})\n"
        "def tried(f, *a, **k):\n"
        "    try:\n"
        "        f(*a, **k)\n"
        "        return 'done'\n"
        "    except OSError as e:\n"
        "        return errno.errorcode[e.errno]\n"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program + code],
        cwd=at,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
