"""What requests may say: capabilities, sizes, pages, paths. Pure."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from threefs.csi.errors import AlreadyExists, InvalidArgument, OutOfRange, StaleToken
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.volume_id import VolumeId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threefs.csi.parameters import Parameters
    from threefs.csi.volumes import Volume

__all__ = [
    "Access",
    "access_of",
    "check_fits",
    "check_path",
    "first_unsupported",
    "page_of",
    "size_of",
    "token_of",
]

PATH_BYTES_MAX = 4096
PAGE_ENTRIES_MAX = 1000
"""So that one reply stays far below gRPC's bound of 4 MiB."""
SIZE_BYTES_MAX = 1 << 62
MOUNT_FLAGS_MAX = 16
MOUNT_FLAGS = ("ro", "rw", "noatime", "relatime", "nodev", "nosuid", "noexec")

Mode = csi.VolumeCapability.AccessMode
WRITERS_ONE_NODE = (
    Mode.SINGLE_NODE_WRITER,
    Mode.SINGLE_NODE_SINGLE_WRITER,
    Mode.SINGLE_NODE_MULTI_WRITER,
)
READERS = (Mode.MULTI_NODE_READER_ONLY,)
WRITERS_MANY_NODES = (Mode.MULTI_NODE_MULTI_WRITER,)
NOT_KEPT = {
    Mode.MULTI_NODE_SINGLE_WRITER: "nothing would keep a second node from writing: ask for "
    "MULTI_NODE_MULTI_WRITER (ReadWriteMany) or SINGLE_NODE_WRITER (ReadWriteOnce)",
    Mode.SINGLE_NODE_READER_ONLY: "nothing would keep a second node from reading: ask for "
    "MULTI_NODE_READER_ONLY (ReadOnlyMany)",
}
"""Modes of the specification whose promise this driver does not keep; Kubernetes asks for none."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a volume is to be mounted."""

    read_only: bool
    single_pod: bool
    single_node: bool
    flags: tuple[str, ...] = ()


def first_unsupported(capabilities: Sequence[csi.VolumeCapability]) -> str:
    """Why one of the capabilities cannot be had; empty when all can."""
    for capability in capabilities:
        kind = capability.WhichOneof("access_type")
        if kind is None:
            return "access_type is missing; ask for a mount"
        if kind == "block":
            return "access_type is block; 3FS volumes are file systems: set volumeMode Filesystem"
        mode = capability.access_mode.mode
        if mode in NOT_KEPT:
            return f"access_mode {Mode.Mode.Name(mode)} is not offered: {NOT_KEPT[mode]}"
        if mode not in (*WRITERS_ONE_NODE, *READERS, *WRITERS_MANY_NODES):
            return f"access_mode {mode} is missing or not known"
        if capability.mount.fs_type not in ("", "3fs", "threefs"):
            return f"fs_type is `{capability.mount.fs_type[:40]}`; leave it out"
        unknown = [flag for flag in capability.mount.mount_flags if flag not in MOUNT_FLAGS]
        if unknown or len(capability.mount.mount_flags) > MOUNT_FLAGS_MAX:
            named = unknown[0][:40] if unknown else "too many"
            return f"mount flag `{named}` is not known; flags are {', '.join(MOUNT_FLAGS)}"
    return ""


def access_of(request_capability: csi.VolumeCapability, *, present: bool) -> Access:
    """The access of a node's request."""
    if not present:
        raise InvalidArgument("volume_capability is missing; say how the volume is to be mounted")
    if reason := first_unsupported([request_capability]):
        raise InvalidArgument(f"volume_capability: {reason}")
    mode = request_capability.access_mode.mode
    flags = tuple(request_capability.mount.mount_flags)
    return Access(
        read_only=mode in READERS or "ro" in flags,
        single_pod=mode == Mode.SINGLE_NODE_SINGLE_WRITER,
        single_node=mode in WRITERS_ONE_NODE,
        flags=tuple(flag for flag in flags if flag not in ("ro", "rw")),
    )


def size_of(wanted: csi.CapacityRange, default_bytes: int) -> int:
    """The size of a new volume: what is required, else the default within the limit."""
    required, limit = wanted.required_bytes, wanted.limit_bytes
    if required < 0 or limit < 0:
        raise InvalidArgument(f"capacity_range is {required} to {limit}; sizes are not negative")
    if limit and required > limit:
        raise InvalidArgument(
            f"capacity_range: required_bytes {required} is above limit_bytes {limit}"
        )
    if required > SIZE_BYTES_MAX:
        raise OutOfRange(f"required_bytes is {required}; at most {SIZE_BYTES_MAX} can be had")
    if required:
        return required
    return min(default_bytes, limit) if limit else default_bytes


def check_fits(volume: Volume, wanted: csi.CapacityRange, parameters: Parameters) -> None:
    """A volume of that name that exists must be what is asked for."""
    name, existing_bytes = volume.name, volume.capacity_bytes
    for key, text in parameters.as_record().items():
        if volume.parameters.get(key) != text:
            raise AlreadyExists(
                f"volume `{name}` exists with {key} {_shown(key, volume.parameters.get(key))} and "
                f"{_shown(key, text)} was asked for; ask for what it has, or use another name"
            )
    required, limit = wanted.required_bytes, wanted.limit_bytes
    if existing_bytes < required or (limit and existing_bytes > limit):
        raise AlreadyExists(
            f"volume `{name}` exists with {existing_bytes} bytes and {required} to "
            f"{limit or 'any number of'} were asked for; expand it, or use another name"
        )


def _shown(key: str, value: object) -> str:
    return f"{value:04o}" if key == "mode" and isinstance(value, int) else str(value)


def check_path(name: str, path: str) -> str:
    """A path of the kubelet: absolute, plain, not enormous."""
    if not path:
        raise InvalidArgument(f"{name} is missing")
    if len(path.encode(errors="replace")) > PATH_BYTES_MAX:
        raise InvalidArgument(f"{name} is longer than {PATH_BYTES_MAX} bytes")
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts or "." in parts or not path.isprintable():
        raise InvalidArgument(f"{name} is {path[:80]!r}; it must be an absolute path without `..`")
    return str(PurePosixPath(path))


def token_of(last: VolumeId) -> str:
    """The token of the page that begins after a volume."""
    return base64.urlsafe_b64encode(str(last).encode()).decode()


def page_of(
    ids: Sequence[VolumeId], starting_token: str, entries_max: int
) -> tuple[list[VolumeId], str]:
    """One page of ids that are in order, and the token of the next; empty at the end."""
    if entries_max < 0:
        raise InvalidArgument(f"max_entries is {entries_max}; it must not be negative")
    after = _token(starting_token)
    left = [volume for volume in ids if str(volume) > after]
    count = min(entries_max or PAGE_ENTRIES_MAX, PAGE_ENTRIES_MAX)
    page = left[:count]
    return page, token_of(page[-1]) if page and len(left) > count else ""


def _token(text: str) -> str:
    if not text:
        return ""
    try:
        return str(VolumeId.parse(base64.b64decode(text, altchars=b"-_", validate=True).decode()))
    except (binascii.Error, UnicodeDecodeError, ValueError, InvalidArgument) as error:
        raise StaleToken(
            f"starting_token {text[:40]!r} is not one that this driver gave; begin the list anew"
        ) from error
