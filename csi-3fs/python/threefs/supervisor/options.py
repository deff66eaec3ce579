"""Options of a single-node cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from threefs.errors import InvalidArgument
from threefs.etcd import NO_ETCD, EtcdOptions, Metadata
from threefs.nodes import DISK_MAX
from threefs.postgres import NO_POSTGRES, PostgresOptions
from threefs.shared_store import SharedStore

__all__ = ["ServeOptions"]


SERVICES_MAX = 16
"""More services of a kind on one machine would only share its processors."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `threefs serve`; times are for one machine."""

    data: Path
    storage: int = 3
    disks: int = 1
    """Folders, each of which is a disk, of every storage process."""
    mgmtds: int = 1
    metas: int = 1
    replicas: int = 3
    chains_per_node: int = 1
    chunk_bytes: int = 1 << 20
    capacity_bytes: int = 0
    restart_after_seconds: float = 1.0
    ready_timeout_seconds: float = 30.0
    node_failure_ms: int = 1000
    scan_ms: int = 20
    gc_delay_ms: int = 2000
    tls: bool = False
    metadata: Metadata = Metadata.EMBEDDED
    convert: bool = False
    etcd_binary: Path | None = None
    etcd: EtcdOptions = NO_ETCD
    postgres: PostgresOptions = NO_POSTGRES

    @property
    def may_run_members(self) -> bool:
        """Whether etcd members run here, for the services or for a conversion."""
        return self.metadata is Metadata.ETCD or self.convert

    @property
    def shared_option(self) -> str:
        """The option that names the store of other machines with the metadata; empty without."""
        if self.etcd.endpoints:
            return "etcd-endpoints"
        return "postgres-url" if self.postgres.url else ""

    def store(self, kind: str) -> dict[str, Any] | None:
        """The shared store of a kind of service in its configuration; None without one."""
        return SharedStore(self.etcd, self.postgres).config(kind)

    def check(self) -> None:
        """Refuse invalid options with the option, its value and the valid values."""
        positive = (
            "storage",
            "disks",
            "mgmtds",
            "metas",
            "replicas",
            "chains_per_node",
            "node_failure_ms",
            "scan_ms",
        )
        for name in positive:
            if getattr(self, name) < 1:
                raise _wrong(name, getattr(self, name), "at least 1")
        if self.disks > DISK_MAX + 1:
            raise _wrong("disks", self.disks, f"at most {DISK_MAX + 1}")
        if self.replicas > self.storage:
            expected = f"at most the number of storage processes ({self.storage})"
            raise _wrong("replicas", self.replicas, expected)
        if self.chunk_bytes & (self.chunk_bytes - 1) or not 1 << 16 <= self.chunk_bytes <= 1 << 26:
            raise _wrong("chunk_bytes", self.chunk_bytes, "a power of two from 64 KiB to 64 MiB")
        if self.capacity_bytes < 0:
            raise _wrong("capacity_bytes", self.capacity_bytes, "0 (the disk's) or more")
        self._check_metadata()
        if self.restart_after_seconds < 0:
            raise _wrong("restart_after", self.restart_after_seconds, "0 or more seconds")

    def _check_metadata(self) -> None:
        self.store("meta")
        if shared := self.shared_option:
            if self.metadata is Metadata.ETCD:
                expected = f"left out with --{shared}, where the metadata is"
                raise _wrong("metadata", self.metadata, expected)
            if self.convert:
                raise _wrong("convert", "given", f"left out with --{shared}")
        if self.etcd_binary is not None and not self.may_run_members:
            raise _wrong("etcd_binary", self.etcd_binary, "given with --metadata etcd")
        for name in ("mgmtds", "metas"):
            count = getattr(self, name)
            if count > SERVICES_MAX:
                raise _wrong(name, count, f"at most {SERVICES_MAX}")
            if count > 1 and self.metadata is Metadata.EMBEDDED and not self.shared_option:
                expected = (
                    "1, unless --metadata etcd, --etcd-endpoints or --postgres-url is given: one "
                    "process opens a store in a folder"
                )
                raise _wrong(name, count, expected)


def _wrong(name: str, value: object, expected: str) -> InvalidArgument:
    option = "--" + name.replace("_", "-")
    return InvalidArgument(f"{option} is {value}; it must be {expected}")
