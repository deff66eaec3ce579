"""`cluster.json`: addresses and key file of a cluster. Replaced atomically."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from threefs.errors import InvalidArgument, NotFound
from threefs.etcd import NO_ETCD, EtcdOptions

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CLUSTER_FILE", "ClusterFile", "one_or_list", "read_addresses", "write_atomically"]

CLUSTER_FILE = "cluster.json"


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """The contents of a `cluster.json`."""

    mgmtd: tuple[str, ...]
    meta: tuple[str, ...]
    key_file: str
    services: dict[str, str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    supervisor_pid: int | None = None
    tls: bool = False
    """Whether connections to the services use TLS."""
    etcd: EtcdOptions = NO_ETCD
    """The etcd members that have the metadata, if it is there."""

    @classmethod
    def read(cls, path: Path) -> ClusterFile:
        """Read and validate a file; for a folder, the `cluster.json` in it."""
        if path.is_dir():
            path = path / CLUSTER_FILE
        try:
            data: Any = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise NotFound(
                f"`{path}` does not exist; start a cluster with `threefs serve --data DIR`, "
                "which writes DIR/cluster.json when it is ready",
                path=str(path),
            ) from error
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"`{path}` cannot be read as JSON: {error}") from error
        return cls._checked(path, data)

    @classmethod
    def _checked(cls, path: Path, data: Any) -> ClusterFile:
        def wrong(name: str, value: object, expected: str) -> InvalidArgument:
            return InvalidArgument(f"`{path}`: `{name}` is {value!r}; it must be {expected}")

        if not isinstance(data, dict):
            raise wrong("(the file)", data, "an object")
        mgmtd, key_file = data.get("mgmtd"), data.get("key_file")
        addresses = isinstance(mgmtd, list) and all(isinstance(item, str) for item in mgmtd)
        if not addresses or not mgmtd:
            raise wrong("mgmtd", mgmtd, 'a list of addresses such as ["127.0.0.1:9000"]')
        meta = read_addresses(data.get("meta"))
        if not meta:
            raise wrong("meta", data.get("meta"), 'an address such as "127.0.0.1:9001", or a list')
        if not isinstance(key_file, str):
            raise wrong("key_file", key_file, "the path of a key file or of a credential")
        tls = data.get("tls", False)
        if not isinstance(tls, bool):
            raise wrong("tls", tls, "true or false")
        etcd = EtcdOptions.from_published(data.get("etcd"))
        if etcd is None:
            raise wrong("etcd", data["etcd"], "null, or an object with endpoints and prefix")
        return cls(
            mgmtd=tuple(mgmtd),
            meta=meta,
            key_file=str((path.parent / key_file).resolve()),
            services=dict(data.get("services") or {}),
            pids=dict(data.get("pids") or {}),
            supervisor_pid=data.get("supervisor_pid"),
            tls=tls,
            etcd=etcd,
        )

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        data = {
            "version": 1,
            "mgmtd": list(self.mgmtd),
            "meta": one_or_list(self.meta),
            "key_file": self.key_file,
            "services": self.services,
            "pids": self.pids,
            "supervisor_pid": self.supervisor_pid,
            "tls": self.tls,
            "etcd": self.etcd.published(),
        }
        write_atomically(path, json.dumps(data, indent=2) + "\n")


def read_addresses(value: object) -> tuple[str, ...]:
    """Return an address or a list of addresses as a tuple; empty if it is neither."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return ()
    return tuple(value)


def one_or_list(addresses: tuple[str, ...]) -> str | list[str]:
    """Return one address as a string, as earlier releases read it, and several as a list."""
    return addresses[0] if len(addresses) == 1 else list(addresses)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a temporary file, sync, rename: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
