"""Nodes on which volumes are accessible, as labels that all of these nodes have. Pure.

A volume of 3FS is accessible wherever the node plugin runs. The labels are those by which the
DaemonSet of the node plugin selects its nodes, so that they are true of every node with the plugin.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from threefs.csi.errors import Exhausted, InvalidArgument
from threefs.csi.proto import csi_pb2 as csi

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Topology", "parse_topology"]

_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"([a-z0-9][-a-z0-9.]{{0,252}}/)?{_NAME}")
_VALUE = re.compile(rf"({_NAME})?")


class Topology:
    """Labels of the nodes on which volumes are accessible; none: on all nodes."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._labels = dict(labels or {})

    def __bool__(self) -> bool:
        return bool(self._labels)

    def segment(self) -> csi.Topology | None:
        """The labels in the terms of the specification; None without labels."""
        return csi.Topology(segments=self._labels) if self._labels else None

    def accessible(self) -> list[csi.Topology]:
        """Where a volume is accessible; empty: on all nodes."""
        segment = self.segment()
        return [] if segment is None else [segment]

    def includes(self, wanted: csi.Topology) -> bool:
        """Whether volumes are accessible on the nodes of a segment."""
        return all(wanted.segments.get(key) == value for key, value in self._labels.items())

    def check(self, requirement: csi.TopologyRequirement) -> None:
        """Refuse a volume that has to be accessible elsewhere only."""
        if not self._labels or not requirement.requisite:
            return
        if not any(self.includes(wanted) for wanted in requirement.requisite):
            labels = ", ".join(f"{key}={value}" for key, value in self._labels.items())
            raise Exhausted(
                f"accessibility_requirements: volumes are accessible on nodes with {labels} only; "
                "remove allowedTopologies of the StorageClass, or use these labels"
            )


def parse_topology(text: str) -> Topology:
    """Labels of the form KEY=VALUE, separated by commas; empty: none."""
    labels: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, separator, value = part.partition("=")
        valid = separator and _KEY.fullmatch(key) and _VALUE.fullmatch(value)
        if not valid or key in labels:
            raise InvalidArgument(
                f"--topology (THREEFS_TOPOLOGY) has `{part[:80]}`; it must be different labels of "
                "nodes, such as example.com/storage=yes, with commas between several"
            )
        labels[key] = value
    return Topology(labels)
