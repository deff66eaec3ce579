"""Exit statuses of the commands, and errors reported with them."""

from __future__ import annotations

import sys

from threefs.errors import InvalidArgument, NotFound, ThreeFSError, Unavailable

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "report_error"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 102
EXIT_TIMEOUT = 106
EXIT_UNREACHABLE = 107
EXIT_INTERRUPTED = 130


def report_error(error: ThreeFSError | OSError) -> int:
    """Print the error; return its exit status."""
    sys.stderr.write(f"threefs: error: {error}\n")
    return _status(error)


def _status(error: ThreeFSError | OSError) -> int:
    if isinstance(error, InvalidArgument):
        return EXIT_USAGE
    if isinstance(error, NotFound | FileNotFoundError):
        return EXIT_NOT_FOUND
    if isinstance(error, Unavailable):
        unreached = error.who is not None and error.who.startswith("mgmtd")
        return EXIT_UNREACHABLE if unreached else EXIT_TIMEOUT
    return EXIT_FAILED
