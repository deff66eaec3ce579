"""Arguments of other interfaces that haiscale cannot fulfil: refused by name, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UnsupportedArgumentError", "refuse"]


class UnsupportedArgumentError(TypeError):
    """An argument that a class has elsewhere; the text has the value that was passed."""

    def __init__(self, function: str, argument: str, value: object, remedy: str) -> None:
        super().__init__(f"{function}: unsupported argument {argument}={value!r}: {remedy}")


def refuse(function: str, arguments: Mapping[str, object], remedies: Mapping[str, str]) -> None:
    """Raises for the first of the arguments; `remedies` lists those that have a special remedy."""
    for name, value in arguments.items():
        remedy = remedies.get(name, "leave it out")
        raise UnsupportedArgumentError(function, name, value, remedy)
