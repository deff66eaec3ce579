"""From what an API server answers to what a user can act on."""

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


def words_for(error: ApiError | AccessError, what: str = "") -> FlyerError:
    """The error a user sees; `what` is the thing that was asked for."""
    text = f"{what}: {error}" if what else str(error)
    if isinstance(error, AccessError):
        return FlyerError.unreachable(
            str(error), "name a cluster with --kubeconfig and --context, or a local one: --state"
        )
    if isinstance(error, NotFoundError):
        return FlyerError.not_found(text, "`flyer ps -A` lists the jobs of all namespaces")
    if isinstance(error, AlreadyExistsError):
        return FlyerError.usage(text, "give it another name, or delete the one that is there")
    if isinstance(error, InvalidError):
        return FlyerError.usage(text, "`kubectl explain flyerjob.spec` tells what is allowed")
    if isinstance(error, ForbiddenError):
        return FlyerError(
            text,
            exit_status=ExitStatus.USAGE,
            code="Forbidden",
            hint="`kubectl auth can-i --list` tells what you may do here; ask for the rest, "
            "or choose another --context or -n",
        )
    return FlyerError.unreachable(text, "`kubectl cluster-info` says whether the server answers")
