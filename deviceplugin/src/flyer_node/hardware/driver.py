"""Interface of a GPU driver and its result types; implemented by `nvml`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flyer_node.inventory.assemble import DriverFacts

__all__ = ["DriverEvent", "EventKind", "GpuDriver", "GpuProbe", "GpuStatus", "RecoveryAction"]


class RecoveryAction(enum.IntEnum):
    """NVML's field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: the action that the driver requests."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7

    @classmethod
    def name_of(cls, value: int) -> str:
        """The name, also of a number that newer drivers may bring."""
        return cls(value).name if value in set(cls) else f"ACTION_{value}"


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """One look at one GPU."""

    uuid: str
    answers: bool
    """False: lost, fallen off the bus, or refused."""
    error: str = ""
    recovery_action: int | None = None
    """None where the driver has no such field."""
    remap_pending: bool = False
    remap_failed: bool = False
    uncorrectable_errors: int | None = None
    """Volatile uncorrected ECC errors since the driver was loaded."""
    links_active: int | None = None
    """NVLink links to another GPU that are up; None if the GPU has none."""


@dataclass(frozen=True, slots=True)
class GpuProbe:
    """A closer look at a GPU that is to return to service."""

    uuid: str
    refused: str = ""
    """The first question that it did not answer, with the driver's words; empty: none."""
    recovery_action: int | None = None
    remap_pending: bool = False
    uncorrectable_errors: int | None = None
    links_active: int | None = None
    link_width: int | None = None
    """PCIe lanes in use, and how many GPU and slot can do together."""
    link_width_max: int | None = None


class EventKind(enum.StrEnum):
    """The kind of a driver event."""

    XID = "xid"
    ECC = "ecc"
    UNAVAILABLE = "unavailable"
    RECOVERY_ACTION = "recovery-action"


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """An event of the driver; `data` is the Xid for that kind."""

    uuid: str
    kind: EventKind
    data: int = 0


class GpuDriver(Protocol):
    """A driver's library. Every call blocks, possibly without end: call it in a worker process."""

    def facts(self) -> DriverFacts:
        """All GPUs and what connects them."""

    def status(self, gpus: Sequence[str]) -> tuple[GpuStatus, ...]:
        """One look at each of these GPUs."""

    def probe(self, gpus: Sequence[str]) -> tuple[GpuProbe, ...]:
        """A closer look at each of these GPUs."""

    def events(self, gpus: Sequence[str], wait_seconds: float) -> Iterator[DriverEvent | None]:
        """Endless iterator over events; None whenever no event occurred for `wait_seconds`."""
