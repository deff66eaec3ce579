"""What the admission policies say when they refuse: every validation, with its remedy.

`WORDS[key]` is the policy, the error and the whole text, as `test_policies` provokes it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import pytest
from flyer.kube.client.errors import ApiError, ForbiddenError, InvalidError

from .real_api import OPERATOR
from .rule_cases import CASES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator


class Words(NamedTuple):
    policy: str
    error: type[ApiError]
    text: str


def _status(more: str = "") -> Words:
    text = f"status: anna may not write it: only {OPERATOR} does; change spec instead{more}"
    return Words("flyerjob-status", ForbiddenError, text)


def _identity(text: str) -> Words:
    return Words("flyerjob-identity", InvalidError, f"metadata.annotations[fireflyer.dev/{text}")


def _priority(level: str) -> Words:
    text = (
        f"spec.priority: {level} is not yours to use, clara: choose normal, lower or auto, or ask "
        f"for the verb use on flyerpriorities.fireflyer.dev/{level}"
    )
    return Words("flyerjob-priority", ForbiddenError, text)


def _own_node(text: str) -> Words:
    return Words("nodehealth-own-node", ForbiddenError, text)


AGENT = "system:serviceaccount:fireflyer-system:flyer-node"
WATCHED = "may not write it: only the agent on that node does; to keep work away set spec.drain"
OWN = "may not write it: an agent writes the object of its own node"

WORDS = {
    "a job's status": _status(" (suspend, stop, priority)"),
    "a quota's status": _status(),
    "the topology's status": _status(),
    "a leader that was replaced": Words(
        "flyerjob-epoch",
        InvalidError,
        "status.epoch: 3 is lower than 4, which FlyerTopology cluster says: a newer leader exists, "
        "stop writing and elect again",
    ),
    "created by another": _identity("user]: ben is not you, anna: leave it out"),
    "taken over": _identity(
        "user]: ben cannot replace anna: it says who created the job, leave it as it is"
    ),
    "asked by another": _identity(
        "changed-by]: ben is not you, anna: leave it out, it is set for you"
    ),
    "a level of others": _priority("extreme-high"),
    "a health by the agent next door": _own_node(
        f"status of NodeHealth a1: {AGENT} on node b7 {WATCHED}"
    ),
    "a health by an agent of no node": _own_node(f"status of NodeHealth a1: {AGENT} {WATCHED}"),
    "a health by anna": _own_node(f"status of NodeHealth a1: anna {WATCHED}"),
    "an object by the agent next door": _own_node(f"NodeHealth a1: the agent on node b7 {OWN}"),
    "an object of another node": _own_node(f"NodeHealth a2: the agent on node b7 {OWN}"),
    "an object by an agent of no node": _own_node(
        f"NodeHealth a1: the agent on node unknown {OWN}"
    ),
    **{
        case.name: Words("flyerjob-fixed", InvalidError, case.says) for case in CASES if case.policy
    },
}


class Reader:
    """Calls that are refused, and which of the words were read."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    async def refuses(self, call: Awaitable[object], key: str) -> None:
        words = WORDS[key]
        policy = f"{words.policy}.fireflyer.dev"
        said = f"ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: "
        with pytest.raises(words.error) as refusal:
            await call
        assert str(refusal.value).endswith(said + words.text)
        self.read.add(key)


def pattern(expression: str) -> str:
    """What a messageExpression may yield: texts as they are, anything for what is computed."""
    return "".join(
        re.escape(term[1:-1]) if re.fullmatch(r"'[^']*'", term) else ".*"
        for term in _terms(expression)
    )


def _terms(expression: str) -> Iterator[str]:
    """What the outermost `+` join."""
    term, depth, quoted = "", 0, False
    for character in expression:
        quoted ^= character == "'"
        if not quoted:
            depth += (character in "([{") - (character in ")]}")
        if character == "+" and not depth and not quoted:
            yield term.strip()
            term = ""
        else:
            term += character
    yield term.strip()
