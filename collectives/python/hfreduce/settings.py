"""Every environment variable that HFReduce reads, with its type, range, default and meaning.

An unknown HFREDUCE_* name is most often a spelling mistake: it gets a warning with the nearest
known name.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hfreduce.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NAMES", "Settings"]

NAMES = {
    "HFREDUCE_ADDRESS": "where other nodes reach this one: addresses (10.0.0.5), networks "
    "(10.0.0.0/8), interfaces (eth0, ib*), exclusions (!docker0), several with commas, best first "
    "(default: the address on the route to rank 0, then the others)",
    "HFREDUCE_CHUNK_BYTES": "bytes of one reduce chunk, 4096 to 16777216 (default: the engine's)",
    "HFREDUCE_CONNECT_SECONDS": "how long ranks wait for each other at the start (default: 120, "
    "or the group's timeout where that is shorter)",
    "HFREDUCE_CUDA_LIBRARY": "the CUDA driver's library, for tensors of GPUs (default: "
    "libcuda.so.1)",
    "HFREDUCE_DAEMON": "socket of the hfreduced that serves this machine's ranks (default: every "
    "rank has threads of its own)",
    "HFREDUCE_DETERMINISM": "stable (bits do not depend on buckets), wide (partial sums of 16- and "
    "8-bit types are not rounded), both with a comma between them, or default",
    "HFREDUCE_DUMP_DIR": "folder for what the flight recorder holds when an error ends a group "
    "(default: hfreduce-UID/dumps in the temporary folder)",
    "HFREDUCE_GDRCOPY": "the library of GDRCopy, for small tensors of GPUs (default: "
    "libgdrapi.so.2 where it is there), or off",
    "HFREDUCE_ISA": "scalar, avx2 or avx512: the widest instructions to use (default: the best)",
    "HFREDUCE_KEY_FILE": "file with the key that proves who belongs to the job (default: rank 0 "
    "makes one and hands it out through torch's store)",
    "HFREDUCE_PINNED_BYTES": "pinned memory of one GPU at most, from 1048576 on (default: 1 GiB)",
    "HFREDUCE_PRIORITY": "low, normal or high: whose chunks go first where a process has several "
    "groups (default: normal)",
    "HFREDUCE_REGISTERED_BYTES": "registered memory of one rank at most, in bytes (default: the "
    "machine's memory, up to 256 GiB; 0 where address space is limited)",
    "HFREDUCE_RENDEZVOUS": "HOST:PORT at which rank 0 listens for programs without torch (default: "
    "MASTER_ADDR and MASTER_PORT)",
    "HFREDUCE_LIVENESS_SECONDS": "silence after which a peer counts as stalled (default: 10)",
    "HFREDUCE_RUN_DIR": "folder for the flight recorders' files, which `hfreduce status` reads "
    "(default: hfreduce in XDG_RUNTIME_DIR, else hfreduce-UID in /dev/shm or /tmp)",
    "HFREDUCE_STREAMS": "TCP streams between two neighboring nodes, 1 to 16, on all ranks alike "
    "(default: 2)",
    "HFREDUCE_TRANSPORT": "auto (nodes on one machine share memory, others use TCP) or tcp "
    "(default: auto)",
}

TRANSPORTS = ("auto", "tcp")
PRIORITIES = ("low", "normal", "high")
MODES = ("default", "stable", "wide", "stable,wide")
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 4096, 16 << 20
STREAMS_MAX = 16
REGISTERED_BYTES_MAX = 1 << 46
PINNED_BYTES_MIN, PINNED_BYTES_MAX = 1 << 20, 1 << 40
KEY_BYTES_MIN, KEY_BYTES_MAX = 16, 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force for one group."""

    job: str = ""
    topology_path: str | None = None
    zone: str | None = None
    address: str | None = None
    chunk_bytes: int | None = None
    connect_seconds: float = 120.0
    liveness_seconds: float = 10.0
    key_file: str | None = None
    transport: str = "auto"
    streams: int | None = None
    determinism: str = "default"
    priority: str = "normal"
    cuda_library: str | None = None
    gdrcopy: str | None = None
    pinned_bytes: int | None = None
    registered_bytes: int | None = None
    daemon: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Reads and checks `environment`; empty values count as absent."""
        for name in environment:
            if name.startswith("HFREDUCE_") and name not in NAMES:
                import difflib

                near = difflib.get_close_matches(name, NAMES, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(NAMES)}"
                warnings.warn(f"{name} is not a setting of HFReduce; {hint}", stacklevel=2)

        def text(name: str) -> str | None:
            return environment.get(name) or None

        return cls(
            job=environment.get("FLYER_JOB", ""),
            topology_path=text("FLYER_TOPOLOGY"),
            zone=text("FLYER_ZONE"),
            address=text("HFREDUCE_ADDRESS"),
            chunk_bytes=_chunk_bytes(text("HFREDUCE_CHUNK_BYTES")),
            connect_seconds=_seconds(environment, "HFREDUCE_CONNECT_SECONDS", 120.0),
            liveness_seconds=_seconds(environment, "HFREDUCE_LIVENESS_SECONDS", 10.0),
            key_file=text("HFREDUCE_KEY_FILE"),
            transport=_transport(text("HFREDUCE_TRANSPORT")),
            streams=_whole("HFREDUCE_STREAMS", text("HFREDUCE_STREAMS"), 1, STREAMS_MAX),
            determinism=_determinism(text("HFREDUCE_DETERMINISM")),
            priority=_priority(text("HFREDUCE_PRIORITY")),
            cuda_library=text("HFREDUCE_CUDA_LIBRARY"),
            gdrcopy=text("HFREDUCE_GDRCOPY"),
            pinned_bytes=_pinned_bytes(text("HFREDUCE_PINNED_BYTES")),
            registered_bytes=_registered_bytes(text("HFREDUCE_REGISTERED_BYTES")),
            daemon=text("HFREDUCE_DAEMON"),
        )

    def key(self) -> bytes | None:
        """The key in the key file, if one is set."""
        if self.key_file is None:
            return None
        try:
            with Path(self.key_file).open("rb") as file:
                key = file.read(KEY_BYTES_MAX + 1).strip()
        except OSError as error:
            raise SettingError("HFREDUCE_KEY_FILE", self.key_file, f"a file ({error})") from error
        if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            expected = f"a file of {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes, not {len(key)}"
            raise SettingError("HFREDUCE_KEY_FILE", self.key_file, expected)
        return key


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    value = environment.get(name)
    if not value:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SettingError(name, value, "a number of seconds above 0")
    return seconds


def _transport(value: str | None) -> str:
    if value is not None and value not in TRANSPORTS:
        raise SettingError("HFREDUCE_TRANSPORT", value, " or ".join(TRANSPORTS))
    return value or "auto"


def _priority(value: str | None) -> str:
    if value is not None and value not in PRIORITIES:
        raise SettingError("HFREDUCE_PRIORITY", value, " or ".join(PRIORITIES))
    return value or "normal"


def _determinism(value: str | None) -> str:
    words = "default" if value is None else ",".join(sorted(map(str.strip, value.split(","))))
    if words not in MODES:
        raise SettingError("HFREDUCE_DETERMINISM", value or "", " or ".join(MODES))
    return words


def _chunk_bytes(value: str | None) -> int | None:
    return _whole("HFREDUCE_CHUNK_BYTES", value, CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)


def _pinned_bytes(value: str | None) -> int | None:
    return _whole("HFREDUCE_PINNED_BYTES", value, PINNED_BYTES_MIN, PINNED_BYTES_MAX)


def _registered_bytes(value: str | None) -> int | None:
    return (
        None
        if value == "0"
        else _whole("HFREDUCE_REGISTERED_BYTES", value, 1, REGISTERED_BYTES_MAX)
    )


def _whole(name: str, value: str | None, least: int, most: int) -> int | None:
    if value is None:
        return None
    number = int(value) if value.isascii() and value.isdigit() else 0
    if not least <= number <= most:
        raise SettingError(name, value, f"a whole number from {least} to {most}")
    return number
