"""What this package refuses: every error names the thing, the value and the remedy."""

from __future__ import annotations

__all__ = ["DataError", "HardwareError", "NodeAgentError", "RequestError", "SettingError"]


class NodeAgentError(Exception):
    """Base of all errors of the package."""


class SettingError(NodeAgentError):
    """A flag or an environment variable with a value that cannot be used."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name = name
        super().__init__(f"{name}: {value!r} cannot be used; give {expected}")


class DataError(NodeAgentError):
    """Stored or received data that is not of the shape it should have; `where` is a path in it."""

    def __init__(self, where: str, value: object, expected: str) -> None:
        self.where = where
        super().__init__(f"{where}: {value!r} is not {expected}")


class HardwareError(NodeAgentError):
    """A question to the hardware that was not answered: the worker hung, died or said no.

    `kind` is one of `hung`, `died`, `refused`; it becomes a finding and an Unknown state.
    """

    def __init__(self, kind: str, question: str, why: str) -> None:
        self.kind = kind
        self.question = question
        super().__init__(f"{question}: {why}")


class RequestError(NodeAgentError):
    """A call of the kubelet that is refused; `code` is the name of the gRPC status."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)
