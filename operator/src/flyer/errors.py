"""Errors of the client and of `flyer`, and their exit statuses.

Every error names the failure, the value and the remedy (`hint`), without a Python traceback. The
exit statuses are part of the interface (docs/reference/cli.md).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

__all__ = ["ExitStatus", "FlyerError", "error_from_json", "error_to_json"]


class ExitStatus(IntEnum):
    """Exit statuses of `flyer`; 1 to 99 and 128+n are the job's own."""

    OK = 0
    USAGE = 2
    JOB_FAILED = 100
    UNFINISHED = 101
    NOT_FOUND = 102
    CANCELLED = 103
    SUSPENDED = 104
    NEVER = 105
    TIMEOUT = 106
    UNREACHABLE = 107


class FlyerError(Exception):
    """An error that the user can act on: `message` is the failure, `hint` the remedy."""

    def __init__(self, message: str, *, exit_status: int, code: str, hint: str = "") -> None:
        """Carry a stable `code` (CamelCase) for programs next to the message for people."""
        super().__init__(message)
        self.message = message
        self.exit_status = exit_status
        self.code = code
        self.hint = hint

    @staticmethod
    def usage(message: str, hint: str = "") -> FlyerError:
        """Invalid input, detected before any change."""
        return FlyerError(message, exit_status=ExitStatus.USAGE, code="BadInput", hint=hint)

    @staticmethod
    def not_found(message: str, hint: str = "") -> FlyerError:
        """An unknown job or node."""
        return FlyerError(message, exit_status=ExitStatus.NOT_FOUND, code="NotFound", hint=hint)

    @staticmethod
    def unreachable(message: str, hint: str = "") -> FlyerError:
        """The cluster has no driver, or its driver ended."""
        return FlyerError(
            message, exit_status=ExitStatus.UNREACHABLE, code="Unreachable", hint=hint
        )

    @staticmethod
    def never(message: str, hint: str = "") -> FlyerError:
        """The job cannot run on this cluster, even on an empty one."""
        return FlyerError(message, exit_status=ExitStatus.NEVER, code="CanNeverRun", hint=hint)

    @staticmethod
    def timeout(message: str, hint: str = "") -> FlyerError:
        """A deadline of the caller has passed."""
        return FlyerError(message, exit_status=ExitStatus.TIMEOUT, code="Timeout", hint=hint)


def error_to_json(error: FlyerError) -> dict[str, Any]:
    """The form an error takes on the control socket and under `-o json`."""
    return {
        "code": error.code,
        "message": error.message,
        "hint": error.hint,
        "exitStatus": int(error.exit_status),
    }


def error_from_json(value: object) -> FlyerError:
    """Rebuild an error sent by a driver; tolerate one from a newer version."""
    fields = value if isinstance(value, dict) else {}
    status = fields.get("exitStatus")
    return FlyerError(
        str(fields.get("message", f"the driver returned an unknown error: {value!r}")),
        exit_status=status if isinstance(status, int) else ExitStatus.JOB_FAILED,
        code=str(fields.get("code", "Unknown")),
        hint=str(fields.get("hint", "")),
    )
