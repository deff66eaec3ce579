"""Decision log: events and actions of each step, one JSON line per step.

The first line contains the arguments of `rebuild`, as does the line of every later rebuild. The
engine is pure, so replaying a log gives the same actions, byte for byte; where it does not, the
engine has changed since the log was written, and `replay` reports the line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from flyer.api import FlyerJob
from flyer.api.base import Model
from flyer.engine import events as events_module
from flyer.engine.engine import rebuild, step
from flyer.engine.errors import ReplayError
from flyer.engine.settings import SchedulerSettings
from flyer.engine.state.nodes import Node, Zones
from flyer.engine.state.preemption_limits import Limits, PriorityCaps
from flyer.engine.state.quotas import Quota

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from flyer.engine.actions import Action
    from flyer.engine.events import Event
    from flyer.engine.state.engine_state import EngineState


VERSION = 7


@dataclass(frozen=True, slots=True)
class Difference:
    """A step whose actions differ from the recorded ones."""

    line: int
    recorded: str
    decided: str


def rebuild_line(
    nodes: Sequence[Node],
    jobs: Sequence[FlyerJob],
    now: float,
    epoch: int,
    settings: SchedulerSettings,
    quotas: Sequence[Quota] = (),
    zones: Zones = Zones(),  # noqa: B008 - frozen
    teams: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The line of a rebuild."""
    record = {
        "version": VERSION,
        "rebuild": {
            "nodes": [_encode(node) for node in nodes],
            "jobs": [_encode(job) for job in jobs],
            "now": now,
            "epoch": epoch,
            "settings": _encode(settings),
            "quotas": [_encode(quota) for quota in quotas],
            "zones": _encode(zones),
            "teams": dict(teams),
        },
    }
    return _line(record)


def step_line(events: Sequence[Event], now: float, actions: Sequence[Action]) -> str:
    """The line of a step."""
    record = {
        "now": now,
        "events": [_encode(event) for event in events],
        "actions": [_encode(action) for action in actions],
    }
    return _line(record)


def replay(lines: Iterable[str]) -> Iterator[Difference]:
    """Repeat all steps; yield those whose actions differ. Raises ReplayError."""
    state: EngineState | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "rebuild" in record:
                state = _rebuild(record)
                continue
            events = [_decode(event, _EVENTS) for event in record["events"]]
            now, recorded = record["now"], record["actions"]
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise ReplayError(number, f"cannot be read: {error}") from error
        if state is None:
            raise ReplayError(number, "comes before a rebuild: a log must start with a rebuild")
        state, actions = step(state, events, now)
        decided = _line({"actions": [_encode(action) for action in actions]})
        if decided != _line({"actions": recorded}):
            yield Difference(number, _line({"actions": recorded}), decided)


def _rebuild(record: dict[str, Any]) -> EngineState:
    if record["version"] != VERSION:
        raise ValueError(f"version {record['version']}, this engine reads {VERSION}")
    recorded = record["rebuild"]
    nodes = [_decode(node, {"Node": Node}) for node in recorded["nodes"]]
    jobs = [_decode(job, {"FlyerJob": FlyerJob}) for job in recorded["jobs"]]
    settings = _decode(recorded["settings"], {"SchedulerSettings": SchedulerSettings})
    quotas = [_decode(quota, {"Quota": Quota}) for quota in recorded["quotas"]]
    zones = _decode(recorded["zones"], {"Zones": Zones})
    return rebuild(
        nodes,
        jobs,
        recorded["now"],
        recorded["epoch"],
        settings,
        quotas,
        zones,
        teams=recorded["teams"],
    )


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _encode(value: Any) -> Any:
    if isinstance(value, Model):
        return {"type": type(value).__name__, **value.to_object()}
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: dict[str, Any], kinds: dict[str, type]) -> Any:
    fields = dict(value)
    name = fields.pop("type")
    kind = kinds[name]
    if issubclass(kind, Model):
        return kind.model_validate(fields)
    hints = _hints_of(name)
    return kind(**{field: _field(hints[field], item) for field, item in fields.items()})


def _field(hint: Any, value: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, dict):
        return _decode(value, {kind.__name__: kind for kind in kinds})
    if isinstance(value, list):
        return tuple(_decode(item, _TYPES) if isinstance(item, dict) else item for item in value)
    if isinstance(hint, type) and hint not in (bool, int, float, str):
        return hint(value)  # an enum
    return value


@functools.cache
def _hints_of(name: str) -> dict[str, Any]:
    return typing.get_type_hints(_TYPES[name])


_EVENTS: dict[str, type] = {
    get_arg.__name__: get_arg for get_arg in typing.get_args(events_module.Event)
}
_TYPES: dict[str, type] = {
    **_EVENTS,
    **{get_arg.__name__: get_arg for get_arg in typing.get_args(events_module.Outcome)},
    "Limits": Limits,
    "Node": Node,
    "PriorityCaps": PriorityCaps,
    "SchedulerSettings": SchedulerSettings,
    "Quota": Quota,
    "Zones": Zones,
}

__all__ = ["VERSION", "Difference", "rebuild_line", "replay", "step_line"]
