"""CEL expressions with the functions that Kubernetes adds, evaluated by Google's runtime.

Types are not checked statically: an expression that reads a field of the wrong type fails when it
is evaluated, while the API server would refuse the definition. Costs are not computed. The bindings
of the runtime truncate strings at a NUL.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Expression", "Failure", "Values", "escaped"]

_DYN: Final = cel.Type.DYN
_CHECK: Final = cel.Type.Map(cel.Type.STRING, _DYN)  # of the authorizer during its construction
# Reserved words of CEL: Kubernetes writes such property names as `__NAME__`.
_RESERVED: Final = frozenset(
    {
        "true", "false", "null", "in", "as", "break", "const", "continue", "else", "for",
        "function", "if", "import", "let", "loop", "package", "namespace", "return", "var", "void",
        "while",
    }
)  # fmt: skip
_NAMES: Final = (
    "self", "oldSelf", "object", "oldObject", "request", "params", "variables", "authorizer",
    "namespaceObject",
)  # fmt: skip


class Failure(Exception):  # noqa: N818 - a result of an evaluation
    """An expression cannot be evaluated, for example because a field is absent."""


def _member(
    name: str, count: int, function: Any, result: Any = _CHECK, receiver: Any = _CHECK
) -> cel.FunctionDecl:
    overload = cel.Overload(
        f"fakekube_{name}_{count}", return_type=result, is_member=True, impl=function,
        parameters=[receiver, *[cel.Type.STRING] * count],
    )  # fmt: skip
    return cel.FunctionDecl(name, [overload])


def _with(field: str) -> Any:
    return lambda check, value: {**check, field: value}


def _account(check: dict[str, Any], namespace: str, name: str) -> dict[str, Any]:
    user = f"system:serviceaccount:{namespace}:{name}"
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
    return {**check, "user": user, "groups": groups}


# Answers `authorizer` checks of the running evaluation; evaluations never overlap.
_allows: list[Any] = []


def _allowed(check: dict[str, Any]) -> bool:
    return bool(_allows[-1](check)) if _allows else False


def _functions() -> list[cel.FunctionDecl]:
    checks = [
        _member(name, 1, _with(field))
        for name, field in (
            ("group", "group"), ("resource", "resource"), ("namespace", "namespace"),
            ("name", "name"), ("check", "verb"), ("subresource", "subresource"),
        )
    ]  # fmt: skip
    return [
        _member("sum", 0, sum, cel.Type.INT, cel.Type.List(_DYN)),
        _member("serviceAccount", 2, _account),
        _member("allowed", 0, _allowed, cel.Type.BOOL),
        *checks,
    ]


@functools.cache
def _environment() -> cel.Env:
    return cel.NewEnv(
        variables=dict.fromkeys(_NAMES, _DYN),
        extensions=[ext_optional.ExtOptional(), ext_strings.ExtStrings()],
        functions=_functions(),
    )


class Values:
    """Variables for expressions; `allows` answers the checks of `authorizer`."""

    def __init__(self, variables: Mapping[str, Any], allows: Any = None) -> None:
        self.variables = variables
        self.allows = allows
        self._activation: cel.Activation | None = None

    @property
    def activation(self) -> cel.Activation:
        """The values in the form of the CEL runtime, converted once."""
        if self._activation is None:
            self._activation = _environment().Activation(self.variables)
        return self._activation


class Expression:
    """One expression, compiled."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._compiled = _environment().compile(text)

    def __call__(self, values: Values) -> Any:
        """Evaluate the expression. Raises Failure."""
        _allows.append(values.allows)
        try:
            result = self._compiled.eval(values.activation)
        finally:
            _allows.pop()
        if result.type() == cel.Type.ERROR:
            raise Failure(str(result.value()))
        return result.plain_value()


def escaped(value: Any, schema: dict[str, Any]) -> Any:
    """The value with escaped property names; keys of maps are unchanged."""
    if isinstance(value, list):
        part = schema.get("items") or {}
        return [escaped(item, part) for item in value] if _escapes(part) else value
    properties = schema.get("properties") or {}
    if not isinstance(value, dict) or not _escapes(schema):
        return value
    return {
        (f"__{name}__" if name in _RESERVED and name in properties else name): escaped(
            property_schema, properties.get(name) or {}
        )
        for name, property_schema in value.items()
    }


def _escapes(schema: dict[str, Any]) -> bool:
    """Whether a property in it has a reserved name."""
    cached = _escaping.get(id(schema))
    if cached is None or cached[0] is not schema:
        properties = schema.get("properties") or {}
        items = schema.get("items")
        required = not _RESERVED.isdisjoint(properties) or any(
            _escapes(value) for value in (*properties.values(), *([items] if items else []))
        )
        cached = _escaping[id(schema)] = (schema, required)
    return cached[1]


_escaping: dict[int, tuple[dict[str, Any], bool]] = {}
