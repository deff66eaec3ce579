"""Errors of an API server as types, by what the caller can do about them."""

from __future__ import annotations

import re

__all__ = [
    "AlreadyExistsError",
    "ApiError",
    "ConflictError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "NotFoundError",
    "OverloadedError",
    "UnreachableError",
    "error_of",
]

_MESSAGE_CHARS_MAX = 500
# Temporary refusals of k8s.io/apiserver's admission plug-ins, which only their messages identify.
# Every namespace gets the service account `default` soon after its creation.
_NOT_READY = re.compile(
    r"failed to configure (?:policy|binding): |not yet ready to handle request"
    r"|error looking up service account [^/ ]+/default: serviceaccount \"default\" not found"
)
# Refusals by a quota, a LimitRange, Pod Security, an admission policy or a webhook.
_LASTING = re.compile(
    r"exceeded quota|failed quota|violates PodSecurity|denied (?:the )?request"
    r"|(?:maximum|minimum) \S+ usage per|limit to request ratio"
)


class ApiError(Exception):
    """A call that failed. `retryable`: the same call may succeed later without any change."""

    retryable = False

    def __init__(
        self,
        call: str,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        self.call = call
        self.code = code
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
        status = f" ({code} {reason})" if code else ""
        super().__init__(f"{call}{status}: {message[:_MESSAGE_CHARS_MAX]}")


class NotFoundError(ApiError):
    """404: the object, its namespace or its kind does not exist."""


class ConflictError(ApiError):
    """409: a concurrent write, or a precondition that does not hold."""


class AlreadyExistsError(ConflictError):
    """409 for a create: an object of this name exists."""


class GoneError(ApiError):
    """410: the requested version is no longer in the server's history. List again."""


class InvalidError(ApiError):
    """400 or 422: the object violates a rule. The message names field, value and remedy."""


class ForbiddenError(ApiError):
    """401 or 403: not permitted, or the namespace is being deleted."""

    @property
    def lasting(self) -> bool:
        """Whether a quota or a policy refused it, which does not change within seconds.

        Other causes may: an expired token, a role or service account that the server does not know
        yet, a quota whose use is not counted yet.
        """
        return bool(_LASTING.search(str(self)))


class OverloadedError(ApiError):
    """429, 500, 503, 504: a temporary failure; retried after `retry_after_seconds`.

    Also temporary refusals of admission (403, 422): for half a minute after its start, a server may
    not know the kinds of its policies' parameters, and a new namespace has no service account for
    pods.
    """

    retryable = True


class UnreachableError(ApiError):
    """No response: refused, interrupted or timed out. The call may have been performed."""

    retryable = True


def error_of(
    call: str, code: int, reason: str, message: str, retry_after_seconds: float | None = None
) -> ApiError:
    """The error for an HTTP status; `reason` is the API's reason, such as AlreadyExists."""
    kind: type[ApiError]
    match code:
        case 403 | 422 if _NOT_READY.search(message):
            kind = OverloadedError
        case 404:
            kind = NotFoundError
        case 409:
            kind = AlreadyExistsError if reason == "AlreadyExists" else ConflictError
        case 410:
            kind = GoneError
        case 400 | 413 | 415 | 422:
            kind = InvalidError
        case 401 | 403:
            kind = ForbiddenError
        case _ if code == 429 or code >= 500:
            kind = OverloadedError
        case _:
            kind = ApiError
    return kind(call, message, code=code, reason=reason, retry_after_seconds=retry_after_seconds)
