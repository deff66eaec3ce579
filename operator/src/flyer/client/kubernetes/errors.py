"""Turns errors of the API server into FlyerError with a hint."""

from __future__ import annotations

from flyer.errors import ExitStatus, FlyerError
from flyer.kube.apiserver import AccessError
from flyer.kube.apiserver.errors import (
    AlreadyExistsError,
    ApiError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
)

__all__ = ["words_for"]


def words_for(error: ApiError | AccessError, subject: str = "") -> FlyerError:
    """The error for the user; `subject` names the requested object."""
    text = f"{subject}: {error}" if subject else str(error)
    if isinstance(error, AccessError):
        return FlyerError.unreachable(
            str(error),
            "select a cluster with --kubeconfig and --context, or a local one with --state",
        )
    if isinstance(error, NotFoundError):
        return FlyerError.not_found(text, "`flyer ps -A` lists the jobs of all namespaces")
    if isinstance(error, AlreadyExistsError):
        return FlyerError.usage(text, "use another name, or delete the existing one")
    if isinstance(error, InvalidError):
        return FlyerError.usage(text, "see `kubectl explain flyerjob.spec`")
    if isinstance(error, ForbiddenError):
        return FlyerError(
            text,
            exit_status=ExitStatus.USAGE,
            code="Forbidden",
            hint="see `kubectl auth can-i --list`; request the permission, "
            "or use another --context or -n",
        )
    return FlyerError.unreachable(text, "check the server with `kubectl cluster-info`")
