"""Error responses of the in-memory API server, with the bodies of a real one."""

from __future__ import annotations

from typing import Any


class ApiRefusal(Exception):  # noqa: N818 - an answer, not a failure of the server
    """An error response: HTTP status, reason, message."""

    def __init__(
        self, code: int, reason: str, message: str, *, retry_after_seconds: int | None = None
    ) -> None:
        self.code = code
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """The Status object."""
        details = (
            {}
            if self.retry_after_seconds is None
            else {"details": {"retryAfterSeconds": self.retry_after_seconds}}
        )
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
            **details,
        }


def not_found(plural: str, name: str) -> ApiRefusal:
    """404 Not Found."""
    return ApiRefusal(404, "NotFound", f'{plural} "{name}" not found')


def conflict(plural: str, name: str, why: str) -> ApiRefusal:
    """409 Conflict, of a write."""
    message = f'Operation cannot be fulfilled on {plural} "{name}": {why}'
    return ApiRefusal(409, "Conflict", message)


def expired(why: str) -> ApiRefusal:
    """410 Expired."""
    return ApiRefusal(410, "Expired", why)


def invalid(plural: str, name: str, why: str) -> ApiRefusal:
    """422 Invalid."""
    return ApiRefusal(422, "Invalid", f'{plural} "{name}" is invalid: {why}')


def modified(plural: str, name: str) -> ApiRefusal:
    """409 for a write of an older version."""
    why = (
        "the object has been modified; please apply your changes to the latest version and try "
        "again"
    )
    return conflict(plural, name, why)


__all__ = ["ApiRefusal", "conflict", "expired", "invalid", "modified", "not_found"]
