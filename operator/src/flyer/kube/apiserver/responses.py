"""Responses of an API server: lines of a stream, and errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import aiohttp

from flyer.kube.apiserver.errors import UnreachableError, error_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flyer.kube.apiserver.errors import ApiError

__all__ = ["describe_failure", "error_of_response", "iter_lines"]

# An API server's response for an unknown path; its other 404 responses are Status objects.
_NO_SUCH_PATH: Final = b"404 page not found"


async def iter_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Complete lines of any length. A torn last line is dropped: the watch resumes before it."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line


def error_of_response(label: str, response: aiohttp.ClientResponse, content: bytes) -> ApiError:
    """The error of a failed response."""
    reason, message = "", content[:200].decode(errors="replace")
    try:
        status = json.loads(content)
        reason, message = str(status.get("reason", "")), str(status.get("message", message))
    except (ValueError, AttributeError):
        pass
    if response.status == 404 and reason != "NotFound" and content.strip() != _NO_SUCH_PATH:
        # From a proxy or load balancer: the API server's response is unknown.
        return UnreachableError(label, f"404 not from an API server: {message[:80]!r}")
    wait = response.headers.get("Retry-After", "")
    retry_after = float(wait) if wait.isdigit() else None
    return error_of(label, response.status, reason, message, retry_after)


def describe_failure(error: BaseException) -> str:
    """Why a call got no response."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientResponseError):
        # Its text has the URL of a proxy, with the password.
        return f"{type(error).__name__}: {error.status} {error.message}"
    return f"{type(error).__name__}: {error}"
