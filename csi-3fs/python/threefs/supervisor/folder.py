"""Data folder of a one-machine cluster: one owner, one key, fixed ports.

::

    DIR/lock            held by the running supervisor; its process id
    DIR/key             the cluster's key, mode 0600, created once
    DIR/settings.json   options with which the cluster was created, and its ports
    DIR/cluster.json    for clients; written when the cluster is ready
    DIR/config, logs    one file per service
    DIR/data            one folder per service
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from typing import IO, TYPE_CHECKING, Any

from threefs.cluster import CLUSTER_FILE, write_atomically
from threefs.errors import AlreadyServed, InvalidArgument, Unavailable
from threefs.supervisor.ports import choose_ports, is_free, reserve, who_listens

if TYPE_CHECKING:
    from pathlib import Path

    from threefs.supervisor.options import ServeOptions

__all__ = ["DataFolder"]

KEY_BYTES = 32
LOG_BYTES_MAX = 16 << 20
HOST = "127.0.0.1"

# The data on disk depends on these options, so they cannot change.
FROZEN = ("storage", "replicas", "chains_per_node")


class DataFolder:
    """The folder, held by this process until it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.key_file = self.path / "key"
        self.cluster_file = self.path / CLUSTER_FILE
        self._lock: IO[str] | None = None

    def take(self) -> None:
        """Create the folder if needed and become its only owner."""
        try:
            for name in ("config", "logs", "data"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(
                f"data folder `{self.path}` cannot be created: {error.strerror}; "
                "choose another with --data"
            ) from error
        lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise AlreadyServed(
                f"`{self.path}` is already served by process {owner}; "
                "use that cluster, stop it, or use another folder with --data"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock
        self.cluster_file.unlink(missing_ok=True)
        if not self.key_file.exists():
            write_atomically(self.key_file, secrets.token_hex(KEY_BYTES) + "\n", mode=0o600)

    def release(self) -> None:
        """Release the folder for another supervisor."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def addresses(self, options: ServeOptions, names: list[str]) -> dict[str, str]:
        """Address of each service: chosen at the first start, and unchanged afterwards."""
        path = self.path / "settings.json"
        requested = {name: getattr(options, name) for name in FROZEN}
        if path.exists():
            settings = json.loads(path.read_text())
            self._check(settings["options"], requested)
            ports: dict[str, int] = settings["ports"]
            self._add_ports(path, settings, names)
            for name, port in ports.items():
                if name in names and not is_free(port, HOST):
                    raise Unavailable(
                        f"port {port} of `{name}` on {HOST} is taken by {who_listens(port)}; "
                        f"stop it, or change the port in `{path}`",
                        who=name,
                    )
                reserve(port)
        else:
            ports = dict(zip(names, choose_ports(len(names), HOST), strict=True))
            text = json.dumps({"options": requested, "ports": ports}, indent=2) + "\n"
            write_atomically(path, text)
        return {name: f"{HOST}:{ports[name]}" for name in names}

    def _add_ports(self, path: Path, settings: dict[str, Any], names: list[str]) -> None:
        """Choose ports of services that the folder did not have yet: more mgmtds or metas."""
        ports: dict[str, int] = settings["ports"]
        new = [name for name in names if name not in ports]
        if not new:
            return
        used = set(ports.values())
        # A port of a stopped service is free, and stays reserved for it.
        free = [port for port in choose_ports(len(new) + len(used), HOST) if port not in used]
        ports.update(zip(new, free, strict=False))
        write_atomically(path, json.dumps(settings, indent=2) + "\n")

    def log(self, name: str) -> Path:
        """Log of a service; a long one is rotated first."""
        path = self.path / "logs" / f"{name}.log"
        if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
            path.replace(path.with_suffix(".log.1"))
        return path

    def _check(self, created_with: dict[str, int], requested: dict[str, int]) -> None:
        for name, value in requested.items():
            if created_with.get(name) != value:
                option = "--" + name.replace("_", "-")
                raise InvalidArgument(
                    f"`{self.path}` was created with {option} {created_with.get(name)}, not "
                    f"{value}; use {option} {created_with.get(name)}, or another folder with --data"
                )
