"""Exceptions of the client. Every message names the object, the place and the remedy.

Errors that have an equivalent in Python are also instances of it, so code written for local files
(``except FileNotFoundError``) keeps working.
"""

# ruff: noqa: N818 -- the package's name qualifies them: `threefs.NotFound` needs no `Error`.

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AlreadyServed",
    "Corrupt",
    "CrossQuota",
    "DirectoryNotEmpty",
    "Exists",
    "InvalidArgument",
    "IsADirectory",
    "NoAttribute",
    "NoSpace",
    "NotADirectory",
    "NotFound",
    "PermissionDenied",
    "QuotaExceeded",
    "ReadOnly",
    "Stale",
    "ThreeFSError",
    "Unavailable",
]


class ThreeFSError(Exception):
    """Base class of all errors of 3FS."""

    code = errno.EIO

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(self.code, message)
        self.message = message
        self.path = path

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Callable[..., ThreeFSError], tuple[Any, ...]]:
        """Processes send errors to each other: `args` are those of `OSError`."""
        return _restored, (type(self), self.args, vars(self))


class NotFound(ThreeFSError, FileNotFoundError):
    """A path, or a part of it, does not exist."""

    code = errno.ENOENT


class Exists(ThreeFSError, FileExistsError):
    """The path already exists."""

    code = errno.EEXIST


class NotADirectory(ThreeFSError, NotADirectoryError):
    """A part of the path that should be a directory is not a directory."""

    code = errno.ENOTDIR


class IsADirectory(ThreeFSError, IsADirectoryError):
    """The path is a directory and the operation requires a file."""

    code = errno.EISDIR


class DirectoryNotEmpty(ThreeFSError, OSError):
    """The directory is not empty."""

    code = errno.ENOTEMPTY


class PermissionDenied(ThreeFSError, PermissionError):
    """The key or the mode does not permit the operation."""

    code = errno.EACCES


class ReadOnly(ThreeFSError, OSError):
    """A change of a snapshot."""

    code = errno.EROFS


class NoSpace(ThreeFSError, OSError):
    """A storage target is full. Acknowledged data is kept; free space and try again."""

    code = errno.ENOSPC


class QuotaExceeded(NoSpace):
    """A directory's quota is exhausted. Remove files below it, or raise the limit."""

    code = errno.EDQUOT


class CrossQuota(ThreeFSError, OSError):
    """A move or link between directories of different quotas. Copy the file instead."""

    code = errno.EXDEV


class NoAttribute(ThreeFSError, OSError):
    """The extended attribute is not set."""

    code = errno.ENODATA


class Stale(ThreeFSError, OSError):
    """An open file was removed or replaced, and its contents no longer exist. Open it again."""

    code = errno.ESTALE


class Corrupt(ThreeFSError, OSError):
    """No replica holds the bytes that were written: every copy fails its checksum, or is lost."""

    code = errno.EIO


class InvalidArgument(ThreeFSError, ValueError):
    """An argument is invalid; the operation had no effect."""

    code = errno.EINVAL


class Unavailable(ThreeFSError, TimeoutError):
    """The deadline passed. ``who`` did not reply; a write may or may not have been executed."""

    code = errno.ETIMEDOUT

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        deadline_seconds: float | None = None,
        who: str | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.deadline_seconds = deadline_seconds
        self.who = who


class AlreadyServed(ThreeFSError):
    """Another supervisor serves this data folder."""

    code = errno.EBUSY


def _restored(kind: type[ThreeFSError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = kind.__new__(kind)
    super(ThreeFSError, error).__init__(*args)
    vars(error).update(state)
    return error
