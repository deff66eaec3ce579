"""Health policy: Xid rules and timers, read from TOML and validated."""

from __future__ import annotations

import enum
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path

from flyer_node.errors import DataError

__all__ = ["Action", "Policy", "Timers", "XidRule", "load_policy", "parse_policy"]

BUILT_IN = Path(__file__).with_name("xid_policy.toml")
XID_MAX = 999
CLASSES = ("software", "nvlink", "ecc", "uncorrectable", "gsp", "other")


class Action(enum.StrEnum):
    """Effect of an Xid on the device's health."""

    RECORD = "record"
    SUSPECT = "suspect"
    PAIR = "pair"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class XidRule:
    """Rule for one Xid."""

    code: int
    klass: str
    action: Action
    remedy: str
    source: str
    reset: bool = False
    recurrence: int = 0


@dataclass(frozen=True, slots=True)
class Timers:
    """Timers in seconds, and counts; `xid_policy.toml` documents each."""

    gpu_hold: float = 10.0
    gpu_hold_max: float = 3600.0
    gpu_probation: float = 30.0
    pair_hold: float = 60.0
    pair_probation: float = 60.0
    port_grace: float = 1.0
    port_hold: float = 10.0
    port_probation: float = 20.0
    suspect: float = 600.0
    flap_hold: float = 600.0
    flap_window: float = 43200.0
    flap_count: float = 3
    merge: float = 5.0


@dataclass(frozen=True)
class Policy:
    """A version of all rules and timers."""

    version: str
    timers: Timers = field(default_factory=Timers)
    xids: dict[int, XidRule] = field(default_factory=dict)

    def rule(self, code: int) -> XidRule:
        """The rule of an Xid; an unknown Xid makes the device Suspect."""
        return self.xids.get(code) or XidRule(
            code,
            "other",
            Action.SUSPECT,
            "validation: this Xid has no rule in the policy",
            "default",
        )


def load_policy(path: Path | None = None) -> Policy:
    """Reads a policy file; without a path, the built-in one."""
    where = path or BUILT_IN
    try:
        text = where.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(where), type(error).__name__, f"a readable file: {error}") from error
    return parse_policy(text, str(where))


def parse_policy(text: str, where: str) -> Policy:
    """Parses a policy; an invalid policy is rejected as a whole."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(where, str(error), "TOML") from None
    _check_keys(data, {"version", "timers", "xid"}, where)
    version = data.get("version")
    if not isinstance(version, str):
        raise DataError(f"{where}: version", version, "a string that names this version")
    rows: dict[int, XidRule] = {}
    for index, row in enumerate(data.get("xid", ())):
        rule = _rule(row, f"{where}: xid[{index}]")
        if rule.code in rows:
            raise DataError(f"{where}: xid[{index}].code", rule.code, "one rule per Xid")
        rows[rule.code] = rule
    return Policy(version, _timers(data.get("timers", {}), f"{where}: timers"), rows)


def _timers(data: object, where: str) -> Timers:
    if not isinstance(data, dict):
        raise DataError(where, data, "a table")
    _check_keys(data, {timer.name for timer in fields(Timers)}, where)
    for name, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e8:
            raise DataError(f"{where}.{name}", value, "a number of seconds, 0 or more")
    return Timers(**{name: float(value) for name, value in data.items()})


def _rule(row: object, where: str) -> XidRule:
    if not isinstance(row, dict):
        raise DataError(where, row, "a table")
    _check_keys(row, {"code", "class", "action", "reset", "recurrence", "remedy", "source"}, where)
    code, klass, action = row.get("code"), row.get("class"), row.get("action")
    if isinstance(code, bool) or not isinstance(code, int) or not 0 < code <= XID_MAX:
        raise DataError(f"{where}.code", code, f"an Xid, 1 to {XID_MAX}")
    if klass not in CLASSES:
        raise DataError(f"{where}.class", klass, f"one of {', '.join(CLASSES)}")
    if action not in set(Action):
        raise DataError(f"{where}.action", action, f"one of {', '.join(Action)}")
    for name in ("remedy", "source"):
        text = row.get(name)
        if not isinstance(text, str) or not 0 < len(text) <= 200:
            raise DataError(f"{where}.{name}", text, "a string of 1 to 200 characters")
    reset, recurrence = row.get("reset", False), row.get("recurrence", 0)
    if not isinstance(reset, bool):
        raise DataError(f"{where}.reset", reset, "true or false")
    if isinstance(recurrence, bool) or not isinstance(recurrence, int) or recurrence < 0:
        raise DataError(f"{where}.recurrence", recurrence, "a count, 0 or more")
    return XidRule(code, klass, Action(action), row["remedy"], row["source"], reset, recurrence)


def _check_keys(data: dict[str, object], allowed: set[str], where: str) -> None:
    unknown = sorted(data.keys() - allowed)
    if unknown:
        raise DataError(where, unknown[0], f"one of the keys {', '.join(sorted(allowed))}")
