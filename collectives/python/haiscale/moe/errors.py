"""Errors of layers with experts; each names the layer and, where one is to blame, the rank."""

from __future__ import annotations

__all__ = ["ExchangeError", "ExpertMismatchError", "MoEError", "NonFiniteError"]


class MoEError(RuntimeError):
    """A layer failed; `layer` is its name and `rank` the job's rank to blame, or None."""

    def __init__(self, layer: str, rank: int | None, problem: str, remedy: str) -> None:
        super().__init__(f"layer {layer!r}: {problem}: {remedy}")
        self.layer = layer
        self.rank = rank
        self.problem = problem
        self.remedy = remedy


class ExpertMismatchError(MoEError):
    """A rank has another layer, or calls another one, than the first rank of its group."""


class NonFiniteError(MoEError):
    """The router's scores on a rank are NaN or infinite; raised on every rank of the group."""


class ExchangeError(MoEError):
    """The exchange of tokens failed; `__cause__` is the error of the collective or of the rank."""
