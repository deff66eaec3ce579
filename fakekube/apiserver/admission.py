"""Fire-Flyer's admission policies as the API server enforces them, and the users of requests.

Every policy of `flyer.api.policies` is in force. User names differ from the chart's: the operator
is `OPERATOR`, the node agent `AGENT`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from flyer.api import names
from flyer.api.policies import (
    NODE_ACCOUNT,
    OPERATOR_ACCOUNT,
    SYSTEM_NAMESPACE,
    admission_policies,
)

from fakekube.apiserver import patches
from fakekube.errors import ApiRefusal
from fakekube.validation.cel import Expression, Failure, Values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fakekube.apiserver.paths import ObjectPath
    from fakekube.apiserver.store import Store
    from fakekube.apiserver.tables import Object

__all__ = ["ADMINISTRATOR", "AGENT", "OPERATOR", "Admission", "Request", "User", "acting"]

OPERATOR: Final = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{OPERATOR_ACCOUNT}"
AGENT: Final = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{NODE_ACCOUNT}"
MASTERS: Final = "system:masters"
_CODES: Final = {"Forbidden": 403, "Invalid": 422, "Unauthorized": 401}
_PARAMETERS: Final = {
    names.KIND_TOPOLOGY: names.PLURAL_TOPOLOGIES,
    names.KIND_QUOTA: names.PLURAL_QUOTAS,
}
_EXTRA: Final = "impersonate-extra-"
_SYSTEM_CLASSES: Final = {
    "system-cluster-critical": 2_000_000_000,
    "system-node-critical": 2_000_001_000,
}


@dataclass(frozen=True, slots=True)
class User:
    """The user of a request, which its headers name without authentication; see `acting`."""

    name: str
    groups: tuple[str, ...] = ()
    extra: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, headers: Mapping[str, str], otherwise: User) -> User:
        """The user in the impersonation headers of kubectl and the product's clients."""
        name = headers.get("Impersonate-User")
        if not name:
            return otherwise
        groups = tuple(
            header for key, header in headers.items() if key.lower() == "impersonate-group"
        )
        extra = {
            key[len(_EXTRA) :].lower().replace("%2f", "/"): [header]
            for key, header in headers.items()
            if key.lower().startswith(_EXTRA)
        }
        return cls(name, groups, extra)


ADMINISTRATOR: Final = User("kubernetes-admin", (MASTERS,))


def acting(user: str, *groups: str, node: str = "") -> dict[str, str]:
    """Impersonation headers of a user with at most one group, as a mapping has each key once."""
    assert len(groups) <= 1, groups
    headers = {"Impersonate-User": user}
    if groups:
        headers["Impersonate-Group"] = groups[0]
    if node:
        headers["Impersonate-Extra-authentication.kubernetes.io%2Fnode-name"] = node
    return headers


@dataclass(frozen=True, slots=True)
class Request:
    """A write, as seen by policies."""

    operation: str  # CREATE, UPDATE or DELETE
    target: ObjectPath
    name: str
    user: User
    dry_run: bool = False
    options: Object = field(default_factory=dict)

    def to_object(self) -> Object:
        """The variable `request`."""
        target, user = self.target, self.user
        resource = {"group": target.group, "version": target.version, "resource": target.plural}
        attributes: Object = {
            "operation": self.operation, "name": self.name, "namespace": target.namespace,
            "resource": resource, "dryRun": self.dry_run, "options": self.options,
            "userInfo": {"username": user.name, "groups": list(user.groups), "extra": user.extra},
        }  # fmt: skip
        return (
            {**attributes, "subResource": target.subresource} if target.subresource else attributes
        )


@dataclass(frozen=True, slots=True)
class _Validation:
    expression: Expression
    message: Expression | None
    fixed: str
    code: int


class _Policy:
    """One policy with its binding, compiled."""

    def __init__(self, policy: Object, binding: Object) -> None:
        spec = policy["spec"]
        self.name: str = policy["metadata"]["name"]
        self._rules = spec["matchConstraints"]["resourceRules"]
        self._conditions = [
            Expression(match_condition["expression"])
            for match_condition in spec.get("matchConditions", ())
        ]
        self._variables = {
            variable["name"]: Expression(variable["expression"])
            for variable in spec.get("variables", ())
        }
        self._param_kind = spec.get("paramKind", {}).get("kind", "")
        self._param = binding["spec"].get("paramRef", {}).get("name", "")
        self._validations = [
            _Validation(
                Expression(validation["expression"]),
                Expression(validation["messageExpression"])
                if "messageExpression" in validation
                else None,
                validation.get("message", f"failed expression: {validation['expression']}"),
                _CODES[validation.get("reason", "Invalid")],
            )
            for validation in spec.get("validations", ())
        ]
        self._mutations = [
            Expression(_as_map(mutation["applyConfiguration"]["expression"]))
            for mutation in spec.get("mutations", ())
        ]

    def matches(self, request: Request) -> bool:
        """Whether the policy applies to this write."""
        return any(
            request.target.group in rule["apiGroups"]
            and request.operation in rule["operations"]
            and request.target.resource in rule["resources"]
            for rule in self._rules
        )

    def mutate(self, request: Request, old: Object | None, new: Object) -> Object:
        """The object after this policy's mutations."""
        variables = self._variables_of(request, old, new)
        for mutation in self._mutations if self._applies(request, variables) else ():
            change = mutation(self._values(mutation, variables, None))
            new = patches.strategic(new, change)
        return new

    def validate(
        self, request: Request, old: Object | None, new: Object | None, store: Store, allows: Any
    ) -> None:
        """Raise if the write is refused."""
        variables = self._variables_of(request, old, new)
        if not self._applies(request, variables):
            return
        for params in self._params(store):
            for validation in self._validations:
                self._validate(request, validation, {**variables, "params": params}, allows)

    def _params(self, store: Store) -> list[Object | None]:
        """The parameters of the policy; without a parameter object the write is allowed."""
        if not self._param_kind:
            return [None]
        plural = _PARAMETERS[self._param_kind]
        if not self._param:
            return list(store.all(plural))  # selects every object
        parameter = store.find(plural, self._param)
        return [] if parameter is None else [parameter]

    def _variables_of(self, request: Request, old: Object | None, new: Object | None) -> Object:
        authorizer = {"user": request.user.name, "groups": list(request.user.groups)}
        return {
            "request": request.to_object(), "object": new, "oldObject": old,
            "authorizer": authorizer,
        }  # fmt: skip

    def _applies(self, request: Request, variables: Object) -> bool:
        try:
            return all(condition(Values(variables)) for condition in self._conditions)
        except Failure as failure:
            raise self._refusal(request, 403, f"a match condition failed: {failure}") from None

    def _validate(
        self, request: Request, validation: _Validation, variables: Object, allows: Any
    ) -> None:
        expression = validation.expression
        try:
            if expression(self._values(expression, variables, allows)) is True:
                return
        except Failure as failure:
            why = f"expression '{expression.text}' resulted in error: {failure}"
            raise self._refusal(request, validation.code, why) from None
        message = validation.fixed
        if validation.message is not None:
            with contextlib.suppress(Failure):
                message = validation.message(self._values(validation.message, variables, allows))
        raise self._refusal(request, validation.code, message)

    def _values(self, expression: Expression, variables: Object, allows: Any) -> Values:
        """The values of the variables that the expression uses, directly or indirectly."""
        computed: Object = {}
        for name in self._required_variables(expression.text):
            values = Values({**variables, "variables": dict(computed)}, allows)
            with contextlib.suppress(Failure):  # raised where it is used
                computed[name] = self._variables[name](values)
        return Values({**variables, "variables": computed}, allows)

    def _required_variables(self, text: str) -> Iterator[str]:
        variables = set(re.findall(r"\bvariables\.(\w+)", text))
        changed = True
        while changed:
            below = {
                name
                for item in variables
                for name in re.findall(r"\bvariables\.(\w+)", self._variables[item].text)
            }
            changed = not below <= variables
            variables |= below
        return (name for name in self._variables if name in variables)  # in order of use

    def _refusal(self, request: Request, code: int, why: str) -> ApiRefusal:
        reason = next(name for name, value in _CODES.items() if value == code)
        group = f".{request.target.group}" if request.target.group else ""
        subject = f'{request.target.plural}{group} "{request.name}" is forbidden'
        policy = f"ValidatingAdmissionPolicy '{self.name}' with binding '{self.name}'"
        return ApiRefusal(code, reason, f"{subject}: {policy} denied request: {why}")


def _as_map(expression: str) -> str:
    """`Object{a: Object.a{b: X}}` as nested maps with one field each, the only form in use."""
    converted = re.sub(r"\bObject[.\w]*\{(\w+):", r"{'\1':", expression)
    assert "Object" not in converted, expression
    return converted


@functools.cache
def _policies() -> tuple[_Policy, ...]:
    documents = admission_policies()
    bindings = {
        match["spec"]["policyName"]: match
        for match in documents
        if match["kind"].endswith("Binding")
    }
    return tuple(
        _Policy(match, bindings[match["metadata"]["name"]])
        for match in documents
        if not match["kind"].endswith("Binding")
    )


@dataclass(frozen=True, slots=True)
class Gate:
    """Admission of one write."""

    admission: Admission
    request: Callable[[Object | None, Object | None], Request]

    def mutate(self, old: Object | None, new: Object) -> Object:
        """The mutated object, before validation."""
        return self.admission.mutate(self.request(old, new), old, new)

    def validate(self, old: Object | None, new: Object | None) -> None:
        """Raise if a policy refuses the write, after validation."""
        self.admission.validate(self.request(old, new), old, new)


class Admission:
    """All policies of one store.

    `grants` are the rights for `authorizer`: (user or group, resource, name, verb). The name `*`
    matches any name, and the group system:masters has every right. `off` names disabled policies;
    `*` disables all.
    """

    def __init__(self, store: Store) -> None:
        self.grants: set[tuple[str, str, str, str]] = set()
        self.off: set[str] = set()
        self._store = store

    def gate(self, request: Callable[[Object | None, Object | None], Request]) -> Gate:
        """Admission of one write; its operation depends on whether the object exists."""
        return Gate(self, request)

    def matching(self, request: Request) -> Iterator[_Policy]:
        """The policies that apply to it."""
        for policy in () if "*" in self.off else _policies():
            if policy.matches(request) and policy.name.partition(".")[0] not in self.off:
                yield policy

    def mutate(self, request: Request, old: Object | None, new: Object) -> Object:
        """The mutated object."""
        for policy in self.matching(request):
            new = policy.mutate(request, old, new)
        return self._with_priority(request, new)

    def _with_priority(self, request: Request, new: Object) -> Object:
        """A new pod with the value of its PriorityClass. A missing class is ignored."""
        spec = new.get("spec")
        if (request.operation, request.target.resource) != ("CREATE", "pods"):
            return new
        if not isinstance(spec, dict) or not isinstance(spec.get("priorityClassName"), str):
            return new
        name = spec["priorityClassName"]
        priority_class = self._store.find("priorityclasses", name)
        value = priority_class["value"] if priority_class else _SYSTEM_CLASSES.get(name)
        return new if value is None else {**new, "spec": {**spec, "priority": value}}

    def validate(self, request: Request, old: Object | None, new: Object | None) -> None:
        """Raise if the write is refused."""
        for policy in self.matching(request):
            policy.validate(request, old, new, self._store, self._allows)

    def _allows(self, check: Object) -> bool:
        subjects = {check["user"], *check["groups"]}
        resource, verb = check.get("resource", ""), check.get("verb", "")
        return MASTERS in subjects or any(
            (subject, resource, name, verb) in self.grants
            for subject in subjects
            for name in (check.get("name", ""), "*")
        )
