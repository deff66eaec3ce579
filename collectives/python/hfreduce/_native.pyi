from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Final, Protocol, Self, final, type_check_only

from typing_extensions import disjoint_base

__all__ = [
    "AVG",
    "BAND",
    "BFLOAT16",
    "BOR",
    "BXOR",
    "FLOAT8_E4M3FN",
    "FLOAT8_E5M2",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "INWARD",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "CollectiveError",
    "Communicator",
    "Completions",
    "Daemon",
    "Endpoint",
    "Gpu",
    "GpuError",
    "Membership",
    "Newcomer",
    "OnGpu",
    "Operations",
    "Place",
    "Registered",
    "Rendezvous",
    "Settings",
    "Topology",
    "Triad",
    "Work",
    "best_instruction_set",
    "blob_bytes_max",
    "descriptors_needed",
    "flight_folders",
    "instruction_set",
    "join",
    "load_topology",
    "pack",
    "reached_at",
    "read_flight",
    "settings_table",
    "unpack",
    "without_gdrcopy",
]

FLOAT32: Final[int]
BFLOAT16: Final[int]
FLOAT16: Final[int]
FLOAT64: Final[int]
INT32: Final[int]
INT64: Final[int]
UINT8: Final[int]
INT8: Final[int]
FLOAT8_E4M3FN: Final[int]
FLOAT8_E5M2: Final[int]
INT16: Final[int]
UINT16: Final[int]
UINT32: Final[int]
UINT64: Final[int]

SUM: Final[int]
AVG: Final[int]
PRODUCT: Final[int]
MIN: Final[int]
MAX: Final[int]
BAND: Final[int]
BOR: Final[int]
BXOR: Final[int]

INWARD: Final[tuple[str, ...]]
"""Name prefixes of virtual interfaces: bridges, tunnels."""

class CollectiveError(RuntimeError):
    kind: str
    """peer_died, peer_stalled, peer_left, timed_out, mismatch, protocol, aborted, io, invalid or
    device (a rank's GPU or the driver of it)."""
    job: str
    rank: int
    """The rank that reports."""
    node: str
    """The node of the rank that reports."""
    peer: int | None
    """The rank that is to blame, where one is known."""
    peer_node: str | None
    operation: str
    sequence: int
    """The operation's number in this communicator (0 is the meeting in `connect`); -1 outside
    operations."""
    phase: str
    detail: str
    seen_by: int
    """The rank that saw it first."""
    absent: tuple[int, ...]
    """Of a monitored barrier: the ranks that did not come. Other errors have no such field."""
    flight_record: str | None
    """The file with what this rank did last, where one was written."""

class GpuError(RuntimeError):
    call: str | None
    """The driver's function that failed."""
    device: int
    """The GPU's number, -1 before one was chosen."""
    code: int | None
    """CUresult."""

@final
class Work:
    def wait(self, timeout_seconds: float | None = None) -> None: ...
    def done(self) -> bool: ...
    # No copy from or to a GPU touches its memory any more, however it ended.
    def drained(self) -> bool: ...
    def error(self) -> CollectiveError | None: ...
    @property
    def sequence(self) -> int: ...
    # The sender of a receive from any rank, once it is known.
    @property
    def source(self) -> int | None: ...

@final
class Completions:
    def __new__(cls) -> Self: ...
    # Puts the token into the queue once all of the works have ended, well or not.
    def watch(self, works: Sequence[Work], token: object) -> None: ...
    # The oldest token; None after that time, or at once after `stop` if none is there.
    def next(self, timeout_seconds: float) -> Any | None: ...
    def stop(self) -> None: ...

def read_flight(path: str | PathLike[str]) -> str: ...
def flight_folders() -> tuple[list[str], str | None]: ...

@final
class Registered:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

# Operations on memory of the host or of one GPU, where several addresses are a TypeError: blocks of
# a GPU are contiguous.
@disjoint_base
class Operations:
    def allreduce(
        self,
        pointer: int,
        numel: int,
        dtype: int,
        op: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def broadcast(
        self,
        pointer: int,
        numel: int,
        dtype: int,
        root: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def reduce(
        self,
        pointer: int,
        numel: int,
        dtype: int,
        op: int,
        root: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def allgather(
        self,
        input_pointer: int,
        output_pointer: int | Sequence[tuple[int, int]],
        numel: int,
        dtype: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def reduce_scatter(
        self,
        input_pointer: int | Sequence[tuple[int, int]],
        output_pointer: int,
        numel: int,
        dtype: int,
        op: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def gather(
        self,
        input_pointer: int,
        output_pointer: int | Sequence[tuple[int, int]],
        numel: int,
        dtype: int,
        root: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def scatter(
        self,
        input_pointer: int | Sequence[tuple[int, int]],
        output_pointer: int,
        numel: int,
        dtype: int,
        root: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def alltoall(
        self,
        input_pointer: int | Sequence[tuple[int, int]],
        output_pointer: int | Sequence[tuple[int, int]],
        input_counts: Sequence[int],
        output_counts: Sequence[int],
        dtype: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def send(
        self,
        pointer: int,
        numel: int,
        dtype: int,
        peer: int,
        tag: int,
        timeout_seconds: float,
        keep: object = None,
    ) -> Work: ...
    def recv(
        self,
        pointer: int,
        numel: int,
        dtype: int,
        peer: int | None,
        tag: int,
        timeout_seconds: float,
        keep: object = None,
    ) -> Work: ...

@final
class Communicator(Operations):
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def on(self, gpu: Gpu, stream: int) -> OnGpu: ...
    def allocate(self, nbytes: int) -> Registered: ...
    def allreduce_many(
        self,
        buffers: Sequence[tuple[int, int]],
        dtype: int,
        op: int,
        timeout_seconds: float,
        lazy: bool = False,
        keep: object = None,
    ) -> Work: ...
    def barrier(self, timeout_seconds: float, lazy: bool = False, keep: object = None) -> Work: ...
    def abort(self, reason: str) -> None: ...
    def error(self) -> CollectiveError | None: ...
    def close(self, timeout_seconds: float = 5.0) -> None: ...
    def stats(self) -> dict[str, int | float | str]: ...
    # Payload bytes by rank of the group: sent to it, and taken from its memory inside the node.
    # Each byte is counted by one of the two ranks. They never decrease; all are 0 with a daemon.
    def peer_bytes(self) -> tuple[list[int], list[int]]: ...
    def reconfigure(
        self, members: Sequence[int | bytes], timeout_seconds: float = 60.0
    ) -> Communicator: ...
    @property
    def epoch(self) -> int: ...
    # Collective operations that ended here without an error, each after all before it.
    @property
    def completed(self) -> int: ...
    # By rank: the epoch that a member left for this one, and what it had completed there.
    @property
    def came_from(self) -> list[tuple[int, int] | None]: ...
    def flight(self) -> dict[str, Any]: ...
    def plan(self) -> dict[str, object]: ...

@final
class Gpu:
    def __new__(
        cls,
        ordinal: int,
        *,
        library: str | None = None,
        pinned_bytes: int | None = None,
        gdrcopy: str | None = None,
    ) -> Self: ...
    @staticmethod
    def owner_of(pointer: int, *, library: str | None = None) -> int | None: ...
    @property
    def ordinal(self) -> int: ...
    # Why GDRCopy does not make the small copies; None where it does.
    @property
    def without_gdrcopy(self) -> str | None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, int]: ...

@final
class OnGpu(Operations): ...

@final
class Newcomer:
    def __new__(
        cls,
        node: str,
        zone: str,
        key: bytes,
        *,
        job: str = ...,
        address: str | None = None,
        towards: str | None = None,
        chunk_bytes: int | None = None,
        slots: int | None = None,
        channels: int | None = None,
        liveness_timeout_seconds: float = 10.0,
        lend: bool = True,
        streams: int | None = None,
        determinism: str = "default",
        daemon: str | None = None,
    ) -> Self: ...
    def info(self) -> bytes: ...
    def join(self, timeout_seconds: float) -> Communicator: ...

@final
class Endpoint:
    def __new__(
        cls,
        rank: int,
        world_size: int,
        placement: Sequence[tuple[str, str]],
        key: bytes,
        *,
        job: str = ...,
        address: str | None = None,
        towards: str | None = None,
        bridge: tuple[str, str] | None = None,
        chunk_bytes: int | None = None,
        slots: int | None = None,
        channels: int | None = None,
        liveness_timeout_seconds: float = 10.0,
        lend: bool = True,
        streams: int | None = None,
        determinism: str = "default",
        priority: str = "normal",
        daemon: str | PathLike[str] | None = None,
    ) -> Self: ...
    def info(self) -> bytes: ...
    def connect(self, infos: Sequence[bytes], timeout_seconds: float) -> Communicator: ...

@final
class Daemon:
    def __new__(
        cls,
        path: str | PathLike[str],
        mode: int,
        ranks_max: int,
        memory_max: int | None = None,
    ) -> Self: ...
    def accept(self, seconds: float) -> None: ...
    @property
    def ranks(self) -> int: ...
    def close(self) -> None: ...

@final
class Settings:
    @staticmethod
    def read(environment: Mapping[str, str]) -> Settings: ...
    def with_priority(self, priority: str) -> Settings: ...
    def key(self) -> bytes | None: ...
    @property
    def job(self) -> str: ...
    @property
    def topology_path(self) -> str | None: ...
    @property
    def address(self) -> str | None: ...
    @property
    def chunk_bytes(self) -> int | None: ...
    @property
    def connect_seconds(self) -> float: ...
    @property
    def liveness_seconds(self) -> float: ...
    @property
    def peer_memory(self) -> bool: ...
    @property
    def streams(self) -> int | None: ...
    @property
    def determinism(self) -> str: ...
    @property
    def priority(self) -> str: ...
    @property
    def cuda_library(self) -> str | None: ...
    @property
    def gdrcopy(self) -> str | None: ...
    @property
    def pinned_bytes(self) -> int | None: ...
    @property
    def registered_bytes(self) -> int | None: ...

@final
class Place:
    def __new__(cls, node: str, zone: str, address: str | None = None) -> Self: ...
    @property
    def node(self) -> str: ...
    @property
    def zone(self) -> str: ...
    @property
    def address(self) -> str | None: ...

@final
class Topology:
    @staticmethod
    def parse(text: str, source: str) -> Topology: ...
    def places(self, ranks: Sequence[int], world_size: int) -> list[Place]: ...
    @property
    def nodes(self) -> list[Place]: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def bridges(self) -> list[tuple[str, str]]: ...
    @property
    def source(self) -> str: ...
    @property
    def world_size(self) -> int: ...

def load_topology(path: str | PathLike[str]) -> Topology: ...
def settings_table() -> str: ...

@final
class Rendezvous:
    # Variables of the settings and of torchrun. Rank 0 listens from here on.
    def __new__(cls, environment: Mapping[str, str]) -> Self: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def port(self) -> int: ...
    # The values of all ranks, in rank order; a RendezvousError names the absent ranks.
    def exchange(self, phase: str, value: bytes, timeout_seconds: float) -> list[bytes]: ...
    # The default is the time-out of the settings.
    def join(self, timeout_seconds: float | None = None) -> Communicator: ...

@final
class Membership:
    # The rank in the group, the job's ranks of all members, and the number of ranks of the job.
    def __new__(cls, rank: int, global_ranks: Sequence[int], world_size: int) -> Self: ...
    @property
    def rank(self) -> int: ...
    @property
    def global_ranks(self) -> tuple[int, ...]: ...
    @property
    def world_size(self) -> int: ...
    @property
    def size(self) -> int: ...
    # Equal lists of ranks have equal digests.
    @property
    def digest(self) -> str: ...

@type_check_only
class _Rendezvous(Protocol):
    # The host of the rendezvous, if known: the other ranks are on the same network.
    @property
    def host(self) -> str | None: ...
    # A random name of the exchange, equal on all ranks, and the values of all ranks in rank order.
    def exchange(
        self, phase: str, value: str, timeout_seconds: float, /
    ) -> tuple[str, list[bytes]]: ...
    # The key of the group, for ranks that have no key file.
    def key(self, timeout_seconds: float, /) -> bytes: ...

# Joins a group; all members call this at about the same time. Exceptions of the rendezvous are
# passed on.
def join(
    rendezvous: _Rendezvous, membership: Membership, settings: Settings, timeout_seconds: float
) -> Communicator: ...

# What all ranks brought, in rank order, as one compressed blob; ValueErrors where it is too long or
# damaged.
def pack(values: Sequence[bytes]) -> bytes: ...
def unpack(blob: bytes, ranks: int) -> list[bytes]: ...
def blob_bytes_max(ranks: int) -> int: ...

@final
class Triad:
    def __new__(cls, threads: int, array_bytes: int) -> Self: ...
    # Bytes per second of all threads together, in the best of three passes.
    def measure(self) -> float: ...

def descriptors_needed(ranks: int, local_ranks: int, streams: int | None = None) -> int: ...
def instruction_set() -> str: ...
def best_instruction_set() -> str: ...

# Interface and address, best first, that HFREDUCE_ADDRESS would choose; ValueError if none fits.
def reached_at(address: str | None = None, towards: str | None = None) -> list[str]: ...

# Why GDRCopy cannot be used here; None where it can.
def without_gdrcopy(gdrcopy: str | None = None) -> str | None: ...
