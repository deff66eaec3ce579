"""Reading what an API server answers: lines of a stream, refusals, and why there was no answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from flyer.kube.client.errors import error_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from flyer.kube.client.errors import ApiError

__all__ = ["lines_of", "refusal_of", "words_of"]


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
    wait = response.headers.get("Retry-After", "")
    retry_after = float(wait) if wait.isdigit() else None
    return error_of(label, response.status, reason, message, retry_after)


def words_of(error: BaseException) -> str:
    """Why there was no answer."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}"
