"""Cluster file: defines the simulated nodes of this machine.

Users write it by hand: every error names file, line, field, value and remedy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from flyer.api.base import StrictModel
from flyer.api.flyerquota import FlyerQuotaSpec
from flyer.api.places import field_of, line_of
from flyer.engine import Node, Quota
from flyer.errors import FlyerError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CLUSTER_KIND", "LocalCluster", "NodeGroup", "Settings", "load_cluster"]

CLUSTER_API_VERSION = "local.fireflyer.dev/v1alpha1"
CLUSTER_KIND = "LocalCluster"
FILE_BYTES_MAX = 1 << 20
NODES_MAX = 1024  # each costs processes here; more is a mistake (simulate with `flyer sim`)
NAME = r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$"
WORD = r"^[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?$"

NodeName = Annotated[str, Field(pattern=NAME)]
Seconds = Annotated[float, Field(ge=0, le=86400, strict=False)]


class NodeGroup(StrictModel):
    """Nodes with the same properties."""

    names: list[NodeName] = Field(min_length=1)
    zone: str = Field(pattern=WORD)
    leaf: str = Field(default="", pattern=r"^$|" + WORD)
    node_class: str = Field(default="default", pattern=WORD)
    slots: int = Field(default=1, ge=1, le=64)


class LocalQuota(FlyerQuotaSpec):
    """A FlyerQuota, by its name."""

    name: NodeName


class Settings(StrictModel):
    """Times for one machine; the engine's defaults are for a cluster."""

    failure_window_seconds: Seconds = 0.5
    start_deadline_seconds: Seconds = 60.0
    stop_pause_seconds: Seconds = Field(default=5.0, description="From SIGTERM to SIGKILL")
    same_zone_layout_seconds: Seconds = 10.0
    restart_cost_seconds: Seconds = 5.0


class LocalCluster(StrictModel):
    """Zones, nodes and slots of one machine."""

    api_version: Literal["local.fireflyer.dev/v1alpha1"] = CLUSTER_API_VERSION  # type: ignore[assignment]
    kind: Literal["LocalCluster"] = CLUSTER_KIND  # type: ignore[assignment]
    name: NodeName
    node_return_seconds: Seconds = 30.0
    preload: list[str] = Field(
        default=[], description="Modules that are imported once and shared by all ranks"
    )
    settings: Settings = Settings()
    nodes: list[NodeGroup] = Field(min_length=1)
    quotas: list[LocalQuota] = Field(default=[], description="As FlyerQuotas on Kubernetes")

    def engine_quotas(self) -> list[Quota]:
        """The quotas as the scheduler sees them."""
        return [Quota.from_spec(quota.name, quota) for quota in self.quotas]

    def engine_nodes(self) -> list[Node]:
        """The nodes as the scheduler sees them, all ready."""
        return [
            Node(name, group.zone, group.leaf, group.node_class, group.slots)
            for group in self.nodes
            for name in group.names
        ]


@dataclass(frozen=True, slots=True)
class _Problem:
    line: int | None
    field: str
    value: str
    why: str

    def text(self, file: str) -> str:
        place = file if self.line is None else f"{file}:{self.line}"
        value = f" {self.value}" if self.value else ""
        return f"{place}: {self.field}:{value} {self.why}" if self.field else f"{place}: {self.why}"


def load_cluster(path: Path) -> LocalCluster:
    """Read a cluster file (YAML, or the JSON that a driver keeps)."""
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FlyerError.usage(
            f"cannot read the cluster file `{path}`: {reason}",
            "name one with --cluster, such as examples/clusters/two-zones.yaml",
        ) from error
    if len(data) > FILE_BYTES_MAX:
        raise _refused(str(path), [_Problem(None, "", "", f"has {len(data)} bytes")])
    document = _parsed(text, str(path))
    if not isinstance(document, CommentedMap):
        raise _refused(str(path), [_Problem(1, "", "", "is not a map with `name` and `nodes`")])
    try:
        cluster = LocalCluster.model_validate(_plain(document))
    except ValidationError as error:
        problems = [_problem(document, detail) for detail in error.errors(include_url=False)]
        raise _refused(str(path), problems) from None
    if problems := _contradictions(cluster, document):
        raise _refused(str(path), problems)
    return cluster


def _refused(file: str, problems: list[_Problem]) -> FlyerError:
    return FlyerError.usage(
        "\n".join(problem.text(file) for problem in problems),
        "examples/clusters/two-zones.yaml shows every field; docs/reference/cli.md explains them",
    )


def _parsed(text: str, file: str) -> Any:
    try:
        return YAML(typ="rt", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = str(error.problem or error.context or "cannot be parsed").splitlines()[0]
        line = mark.line + 1 if mark else None
        raise _refused(file, [_Problem(line, "", "", f"is not YAML: {why}")]) from None
    except (YAMLError, ValueError, RecursionError) as error:
        why = str(error).splitlines()[0]
        raise _refused(file, [_Problem(None, "", "", f"is not YAML: {why}")]) from None


def _plain(value: Any) -> Any:
    """The value in Python's built-in types, which strict models require."""
    if isinstance(value, CommentedMap):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, CommentedSeq):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _problem(document: CommentedMap, detail: Any) -> _Problem:
    path = tuple(detail["loc"])
    given_value = detail["input"]
    value = (
        "" if isinstance(given_value, dict | list) else json.dumps(given_value, default=str)[:60]
    )
    why = {
        "extra_forbidden": "is an unknown field: remove it or correct its name",
        "missing": "is missing: add it",
        "string_pattern_mismatch": "is invalid: use letters, digits and inner dashes "
        "(node and cluster names in lower case)",
        "int_type": "is not an integer: write it without quotes",
        "list_type": "is not a list: write [a, b], or one entry per line after a dash",
        "too_short": "is empty: give at least one entry",
        "literal_error": f"is not a valid value: write {detail.get('ctx', {}).get('expected', '')}",
    }.get(detail["type"], detail["msg"].replace("Input should be", "must be"))
    return _Problem(line_of(document, path), field_of(path), value, why)


def _contradictions(cluster: LocalCluster, document: CommentedMap) -> list[_Problem]:
    problems, names = [], set()
    leaf_zones: dict[str, str] = {}
    for index, group in enumerate(cluster.nodes):
        for position, name in enumerate(group.names):
            if name in names:
                path = ("nodes", index, "names", position)
                why = "is a duplicate: node names must be unique in a cluster"
                problems.append(_Problem(line_of(document, path), field_of(path), f'"{name}"', why))
            names.add(name)
        zone = leaf_zones.setdefault(group.leaf, group.zone)
        if group.leaf and zone != group.zone:
            place = ("nodes", index, "leaf")
            why = f"is in zone {group.zone} here and in zone {zone} above: a leaf has one zone"
            problems.append(
                _Problem(line_of(document, place), field_of(place), f'"{group.leaf}"', why)
            )
    quota_names: set[str] = set()
    for index, quota in enumerate(cluster.quotas):
        if quota.name in quota_names:
            location = ("quotas", index, "name")
            why = "is a duplicate: quota names must be unique"
            problems.append(
                _Problem(line_of(document, location), field_of(location), f'"{quota.name}"', why)
            )
        quota_names.add(quota.name)
    if len(names) > NODES_MAX:
        why = (
            f"exceeds the maximum of {NODES_MAX} nodes: each node starts processes on this machine"
        )
        problems.append(_Problem(line_of(document, ("nodes",)), "nodes", str(len(names)), why))
    return problems
