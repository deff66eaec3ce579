"""Data folder of a one-machine cluster: one owner, one key, fixed ports.

::

    DIR/lock            held by the running supervisor; its process id
    DIR/key             the cluster's key, mode 0600, created once
    DIR/settings.json   options with which the cluster was created, its ports and kind of stores
    DIR/cluster.json    for clients; written when the cluster is ready
    DIR/config, logs    one file per service
    DIR/data            one folder per service; of storage, one per disk
    DIR/etcd            certificate of the etcd members, and its key
    DIR/converted       dumps of the last conversion of the metadata
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from typing import IO, TYPE_CHECKING, Any

from threefs.cluster import CLUSTER_FILE, write_atomically
from threefs.errors import AlreadyServed, InvalidArgument, Unavailable
from threefs.etcd import Metadata
from threefs.supervisor.plan import disk_folders
from threefs.supervisor.ports import choose_ports, is_free, reserve, who_listens

if TYPE_CHECKING:
    from pathlib import Path

    from threefs.supervisor.options import ServeOptions

__all__ = ["DataFolder"]

KEY_BYTES = 32
NEW_DISK_FILE = "adopt"
"""Empty file by which a storage service uses a folder as a new disk."""
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

    def metadata(self) -> Metadata:
        """The kind of the stores that have the metadata; embedded if there is none yet."""
        return Metadata(self._settings().get("metadata", Metadata.EMBEDDED))

    def check_metadata(self, options: ServeOptions) -> None:
        """Refuse a folder whose metadata is in stores of the other kind."""
        stored = self.metadata()
        if not self._settings() or options.convert or stored is options.metadata:
            return
        if options.shared_option:
            raise InvalidArgument(
                f"the metadata of `{self.path}` is in its own etcd members, not in the store of "
                f"--{options.shared_option}; use --metadata etcd, or convert it first with "
                "--metadata embedded --convert, and then with dumps of both stores"
            )
        raise InvalidArgument(
            f"`{self.path}` was created with --metadata {stored}, not {options.metadata}; use "
            f"--metadata {stored}, or add --convert to convert it"
        )

    def make_disks(self, options: ServeOptions) -> None:
        """Make missing folders of disks, which the services then use as new disks.

        A folder that exists is left as it is: it may be where a file system is not mounted now.
        """
        data, services = self.path / "data", range(1, options.storage + 1)
        wanted = {name for service in services for name in disk_folders(options, service)}
        if unused := {path.name for path in data.glob("storage-*.*")} - wanted:
            raise InvalidArgument(
                f"`{data}` has the disks {', '.join(sorted(unused))}, which --disks "
                f"{options.disks} leaves out: raise it; or empty their nodes with `threefs drain` "
                "and remove these folders"
            )
        if options.disks == 1:
            return  # Services with one disk make its folder.
        for folder in (data / name for name in sorted(wanted)):
            if not folder.exists():
                draft = data / "new-disk"
                draft.mkdir(exist_ok=True)
                (draft / NEW_DISK_FILE).touch()
                draft.rename(folder)  # At once, so that it never exists without its mark.

    def set_metadata(self, kind: Metadata) -> None:
        """Store the kind of the stores that have the metadata from now on."""
        self._write(self._settings() | {"metadata": kind, "members_started": kind == Metadata.ETCD})

    def etcd_prefix(self) -> str:
        """Prefix of this cluster's keys in etcd, which no other cluster has."""
        settings = self._settings()
        if "etcd_prefix" not in settings:
            settings["etcd_prefix"] = f"/3fs-{secrets.token_hex(4)}"
            self._write(settings)
        prefix: str = settings["etcd_prefix"]
        return prefix

    def check_members(self, names: list[str]) -> None:
        """Refuse an etcd member that has lost its log: its vote could lose acknowledged changes."""
        if not self._settings().get("members_started"):
            return
        for name in names:
            log = self.path / "data" / name / "member" / "wal"
            if not log.exists():
                raise Unavailable(
                    f"`{log}` of the etcd member {name} is missing; put it back, or load a backup "
                    "of mgmtd and meta into a cluster in another folder",
                    who=name,
                )

    def addresses(self, options: ServeOptions, names: list[str]) -> dict[str, str]:
        """Address of each service: chosen at the first start, and unchanged afterwards."""
        path = self._settings_file
        requested = {name: getattr(options, name) for name in FROZEN}
        if settings := self._settings():
            self._check(settings["options"], requested)
            ports: dict[str, int] = settings["ports"]
            self._add_ports(settings, names)
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
            self._write({"options": requested, "ports": ports, "metadata": options.metadata})
        return {name: f"{HOST}:{ports[name]}" for name in names}

    @property
    def _settings_file(self) -> Path:
        return self.path / "settings.json"

    def _settings(self) -> dict[str, Any]:
        """The stored settings; empty in a new folder."""
        if not self._settings_file.exists():
            return {}
        settings: dict[str, Any] = json.loads(self._settings_file.read_text())
        return settings

    def _write(self, settings: dict[str, Any]) -> None:
        write_atomically(self._settings_file, json.dumps(settings, indent=2) + "\n")

    def _add_ports(self, settings: dict[str, Any], names: list[str]) -> None:
        """Choose ports of services that the folder did not have yet: more mgmtds or metas."""
        ports: dict[str, int] = settings["ports"]
        new = [name for name in names if name not in ports]
        if not new:
            return
        used = set(ports.values())
        # A port of a stopped service is free, and stays reserved for it.
        free = [port for port in choose_ports(len(new) + len(used), HOST) if port not in used]
        ports.update(zip(new, free, strict=False))
        self._write(settings)

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
