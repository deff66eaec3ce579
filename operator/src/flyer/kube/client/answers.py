"""Reading what an API server answers: lines of a stream, refusals, and why there was no answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from flyer.kube.client.errors import UnreachableError, error_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from flyer.kube.client.errors import ApiError

__all__ = ["lines_of", "refusal_of", "words_of"]

# An API server's answer to a path of which it has no kind; all else of its 404s are Status objects.
_NO_SUCH_PATH: Final = b"404 page not found"


async def lines_of(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines, however long. A torn last one is left out: the watch begins again before it."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line


def refusal_of(label: str, response: aiohttp.ClientResponse, content: bytes) -> ApiError:
    """The error that an answer is."""
    reason, message = "", content[:200].decode(errors="replace")
    try:
        status = json.loads(content)
        reason, message = str(status.get("reason", "")), str(status.get("message", message))
    except (ValueError, AttributeError):
        pass
    if response.status == 404 and reason != "NotFound" and content.strip() != _NO_SUCH_PATH:
        # A proxy or a load balancer: what the API server would say is not known.
        return UnreachableError(label, f"404 that is not an API server's: {message[:80]!r}")
    wait = response.headers.get("Retry-After", "")
    retry_after = float(wait) if wait.isdigit() else None
    return error_of(label, response.status, reason, message, retry_after)


def words_of(error: BaseException) -> str:
    """Why there was no answer."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}"
