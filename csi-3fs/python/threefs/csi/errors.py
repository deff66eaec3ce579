"""Refusals of the driver: each is one gRPC status code and a sentence with thing, value, remedy."""

# ruff: noqa: N818 -- they are answers, named as the specification names them.

from __future__ import annotations

from typing import ClassVar

import grpc

from threefs.errors import InvalidArgument as InvalidArgument3FS
from threefs.errors import NoSpace, PermissionDenied, ThreeFSError, Unavailable

__all__ = [
    "AlreadyExists",
    "CsiError",
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
    "Unwritten",
    "from_storage",
]


class CsiError(Exception):
    """What a call answers instead of a reply."""

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
    """Something of this name exists and is not what was asked for."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unreadable(AlreadyExists):
    """The record of a volume says nothing that this driver understands."""


class FailedPrecondition(CsiError):
    """The volume is in a state in which this cannot be done."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class OutOfRange(CsiError):
    """A size that cannot be had."""

    code = grpc.StatusCode.OUT_OF_RANGE


class InFlight(CsiError):
    """Another call for the same volume is under way; the caller tries again later."""

    code = grpc.StatusCode.ABORTED


class StaleToken(CsiError):
    """A page token that this driver did not give; begin the list anew."""

    code = grpc.StatusCode.ABORTED


class Unreachable(CsiError):
    """3FS or the holder does not answer; the same call may go well later."""

    code = grpc.StatusCode.UNAVAILABLE


class Unwritten(CsiError):
    """A mount has data that is not in 3FS yet: it stays, and the caller asks again."""

    code = grpc.StatusCode.UNAVAILABLE


class TooLarge(CsiError):
    """A request larger than any that this driver answers."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NoPermission(CsiError):
    """The cluster's key does not open it."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Exhausted(CsiError):
    """3FS is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


def from_storage(error: ThreeFSError) -> CsiError:
    """An error of 3FS that the driver did not expect, as the code that lets callers act on it."""
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
