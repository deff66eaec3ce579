"""Errors of the driver: each has a gRPC status code and a message with field, value and remedy."""

# ruff: noqa: N818 -- they are replies, named as in the specification.

from __future__ import annotations

from typing import ClassVar

import grpc

from threefs.errors import InvalidArgument as InvalidArgument3FS
from threefs.errors import NoSpace, PermissionDenied, ThreeFSError, Unavailable

__all__ = [
    "AlreadyExists",
    "CsiError",
    "DirtyMount",
    "Exhausted",
    "FailedPrecondition",
    "InFlight",
    "InvalidArgument",
    "Missing",
    "NoPermission",
    "OutOfRange",
    "StaleToken",
    "TooLarge",
    "Unreachable",
    "Unreadable",
    "from_storage",
]


class CsiError(Exception):
    """An error reply of a call."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgument(CsiError):
    """A field is missing or wrong; nothing was done."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class Missing(CsiError):
    """The volume, or the path, does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(CsiError):
    """A volume of this name exists with other properties."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unreadable(AlreadyExists):
    """The record of a volume cannot be parsed."""


class FailedPrecondition(CsiError):
    """The state of the volume does not allow the call."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class OutOfRange(CsiError):
    """The size cannot be provided."""

    code = grpc.StatusCode.OUT_OF_RANGE


class InFlight(CsiError):
    """Another call for the same volume is in progress; the caller retries later."""

    code = grpc.StatusCode.ABORTED


class StaleToken(CsiError):
    """A page token that this driver did not issue; restart the listing."""

    code = grpc.StatusCode.ABORTED


class Unreachable(CsiError):
    """3FS or the mount manager does not answer; the same call may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE


class DirtyMount(CsiError):
    """A mount has dirty data that is not in 3FS yet: it stays mounted, and the caller retries."""

    code = grpc.StatusCode.UNAVAILABLE


class TooLarge(CsiError):
    """The request is larger than the driver accepts."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NoPermission(CsiError):
    """The credential does not allow the operation."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Exhausted(CsiError):
    """3FS is full, or has no space where the volume has to be accessible."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


def from_storage(error: ThreeFSError) -> CsiError:
    """Map an unexpected error of 3FS to the status code on which callers can act."""
    if isinstance(error, Unavailable):
        return Unreachable(f"3FS does not answer: {error}")
    if isinstance(error, NoSpace):
        return Exhausted(str(error))
    if isinstance(error, PermissionDenied):
        return NoPermission(str(error))
    if isinstance(error, FileNotFoundError):
        return Missing(str(error))
    if isinstance(error, InvalidArgument3FS):
        return InvalidArgument(str(error))
    return CsiError(str(error))
