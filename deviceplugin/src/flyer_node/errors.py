"""Errors of the package: each message names the subject, the value and the remedy."""

from __future__ import annotations

__all__ = ["DataError", "HardwareError", "NodeAgentError", "RequestError", "SettingError"]


class NodeAgentError(Exception):
    """Base of all errors of the package."""


class SettingError(NodeAgentError):
    """Invalid value of a flag or an environment variable."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name = name
        super().__init__(f"{name}: invalid value {value!r}; expected {expected}")


class DataError(NodeAgentError):
    """Stored or received data that fails validation; `where` is a path in it."""

    def __init__(self, where: str, value: object, expected: str) -> None:
        self.where = where
        super().__init__(f"{where}: invalid value {value!r}; expected {expected}")


class HardwareError(NodeAgentError):
    """A hardware query without an answer: the worker hung, died or returned an error.

    `kind` is `hung`, `died` or `refused`. The agent reports a finding and the state Unknown.
    """

    def __init__(self, kind: str, query: str, why: str) -> None:
        self.kind = kind
        self.query = query
        super().__init__(f"{query}: {why}")


class RequestError(NodeAgentError):
    """A rejected request of the kubelet; `code` is the name of the gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)
