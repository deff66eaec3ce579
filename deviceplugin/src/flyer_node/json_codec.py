"""JSON codec of frozen dataclasses, with validation on decode.

Supports what the models use: str, int, float, bool, None, string enums, tuples, dicts with string
keys, optional values and dataclasses of these. Unknown and missing keys are errors that name them.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from functools import cache
from typing import Any, TypeVar

from flyer_node.errors import DataError

__all__ = ["from_json", "to_json"]

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Encodes a model."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list, frozenset)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], value: Any, where: str = "") -> T:
    """Decodes a model of type `kind`; DataError has the path of the invalid value."""
    return typing.cast("T", _read(kind, value, where or kind.__name__))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(kind, value, where)
    if origin in (tuple, dict):
        return _read_container(kind, origin, value, where)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            raise DataError(where, value, f"one of {[member.value for member in kind]}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise DataError(where, value, f"of type {kind.__name__}")
    return value


def _read_union(kind: Any, value: Any, where: str) -> Any:
    options = typing.get_args(kind)
    if value is None and types.NoneType in options:
        return None
    real = [option for option in options if option is not types.NoneType]
    assert len(real) == 1, f"{kind}: only optional values are supported"
    return _read(real[0], value, where)


def _read_container(kind: Any, origin: Any, value: Any, where: str) -> Any:
    arguments = typing.get_args(kind)
    if origin is dict:
        if not isinstance(value, dict):
            raise DataError(where, value, "an object")
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if not isinstance(value, list):
        raise DataError(where, value, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(
            _read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)
        )
    if len(value) != len(arguments):
        raise DataError(where, value, f"a list of {len(arguments)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(_read(part, item, f"{where}[{index}]") for index, (part, item) in enumerate(pairs))


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise DataError(where, value, "an object")
    hints = _hints(kind)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise DataError(where, sorted(unknown), f"known here; fields are {sorted(hints)}")
    values = {
        name: _read(hints[name], item, f"{where}.{name}" if where else name)
        for name, item in value.items()
    }
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = required - values.keys()
    if missing:
        raise DataError(where, sorted(missing), "allowed to be absent")
    return kind(**values)
