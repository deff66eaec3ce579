"""Conversion of a stopped cluster's metadata between embedded stores and etcd members.

The settings of the folder name the store that is valid, and change once both loads are complete:
an interrupted conversion is repeated from the beginning. What the other store contained is removed
first; it was the source of an earlier conversion, or the target of an interrupted one.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

from threefs import _native
from threefs.errors import Unavailable
from threefs.etcd import Metadata
from threefs.supervisor.members import MEMBER_NAMES
from threefs.supervisor.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from threefs.etcd import EtcdOptions
    from threefs.supervisor.folder import DataFolder
    from threefs.supervisor.plan import Service

__all__ = ["convert"]

KINDS = ("mgmtd", "meta")


def convert(
    folder: DataFolder,
    target: Metadata,
    etcd: EtcdOptions,
    members: list[Service],
    log: Callable[[str], None],
) -> None:
    """Copy the rows of both services into stores of the other kind, which become the valid ones."""
    data = folder.path / "data"
    for name in MEMBER_NAMES if target is Metadata.ETCD else KINDS:
        shutil.rmtree(data / name, ignore_errors=True)
    dumps = folder.path / "converted"
    dumps.mkdir(mode=0o700, exist_ok=True)
    processes = Processes(members, folder, 0.0, log)
    try:
        processes.start_all()
        for kind in KINDS:
            embedded = json.dumps({"data": str(data / kind)})
            over_etcd = json.dumps({"etcd": etcd.config(kind)})
            stores = (embedded, over_etcd) if target is Metadata.ETCD else (over_etcd, embedded)
            rows = _copy(kind, *stores, dumps / f"{kind}.dump")
            log(f"converted {rows} rows of {kind} to {target}; a dump is in {dumps}")
    except OSError as error:
        raise Unavailable(
            f"the conversion of `{folder.path}` to {target} failed, and changed nothing: {error}"
        ) from error
    finally:
        processes.stop_all()
    folder.set_metadata(target)


def _copy(kind: str, source: str, target: str, file: Path) -> int:
    dumped = _native.store_dump(kind, source, file, _ignore)
    loaded = _native.store_load(kind, target, file, _ignore)
    if loaded != dumped:
        raise OSError(f"{dumped} rows and bytes of {kind} were dumped, and {loaded} loaded")
    return dumped[0]


def _ignore(_done: int, _total: int) -> None:
    """The rows of a one-machine cluster are copied in seconds."""
