"""Validation of requests: capabilities, sizes, pages, paths. Pure."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from threefs.csi.errors import AlreadyExists, InvalidArgument, OutOfRange, StaleToken
from threefs.csi.proto import csi_pb2 as csi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from threefs.csi.volumes.parameters import Parameters
    from threefs.csi.volumes.volumes import Volume

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
"""Keeps a reply far below gRPC's limit of 4 MiB."""
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
UNSUPPORTED_MODES = {
    Mode.MULTI_NODE_SINGLE_WRITER: "a second node could write: request "
    "MULTI_NODE_MULTI_WRITER (ReadWriteMany) or SINGLE_NODE_WRITER (ReadWriteOnce)",
    Mode.SINGLE_NODE_READER_ONLY: "a second node could read: request "
    "MULTI_NODE_READER_ONLY (ReadOnlyMany)",
}
"""Modes that this driver cannot enforce; Kubernetes never requests them."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to mount a volume."""

    read_only: bool
    single_pod: bool
    single_node: bool
    flags: tuple[str, ...] = ()


def first_unsupported(capabilities: Sequence[csi.VolumeCapability]) -> str:
    """Return why a capability is not supported; empty if all are."""
    for capability in capabilities:
        kind = capability.WhichOneof("access_type")
        if kind is None:
            return "access_type is missing; request a mount"
        if kind == "block":
            return "access_type is block; 3FS volumes are file systems: set volumeMode Filesystem"
        mode = capability.access_mode.mode
        if mode in UNSUPPORTED_MODES:
            return f"access_mode {Mode.Mode.Name(mode)} is not supported: {UNSUPPORTED_MODES[mode]}"
        if mode not in (*WRITERS_ONE_NODE, *READERS, *WRITERS_MANY_NODES):
            return f"access_mode {mode} is missing or unknown"
        if capability.mount.fs_type not in ("", "3fs", "threefs"):
            return f"fs_type is `{capability.mount.fs_type[:40]}`; omit it"
        unknown = [flag for flag in capability.mount.mount_flags if flag not in MOUNT_FLAGS]
        if unknown or len(capability.mount.mount_flags) > MOUNT_FLAGS_MAX:
            named = unknown[0][:40] if unknown else "too many"
            return f"unknown mount flag `{named}`; supported are {', '.join(MOUNT_FLAGS)}"
    return ""


def access_of(request_capability: csi.VolumeCapability, *, present: bool) -> Access:
    """Return the access mode of a request to the node."""
    if not present:
        raise InvalidArgument("volume_capability is missing; specify how to mount the volume")
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


def size_of(requested: csi.CapacityRange, default_bytes: int) -> int:
    """Return the size of a new volume: the required size, or the default within the limit."""
    required, limit = requested.required_bytes, requested.limit_bytes
    if required < 0 or limit < 0:
        raise InvalidArgument(
            f"capacity_range is {required} to {limit}; sizes must not be negative"
        )
    if limit and required > limit:
        raise InvalidArgument(
            f"capacity_range: required_bytes {required} is above limit_bytes {limit}"
        )
    if required > SIZE_BYTES_MAX:
        raise OutOfRange(f"required_bytes is {required}; the maximum is {SIZE_BYTES_MAX}")
    if required:
        return required
    return min(default_bytes, limit) if limit else default_bytes


def check_fits(volume: Volume, requested: csi.CapacityRange, parameters: Parameters) -> None:
    """Check that an existing volume of the same name matches the request."""
    name, existing_bytes = volume.name, volume.capacity_bytes
    for key, text in parameters.as_record().items():
        # Volumes of earlier releases have no retention.
        existing_value = volume.parameters.get(key, 0)
        if existing_value != text:
            existing = _format_value(key, existing_value)
            raise AlreadyExists(
                f"volume `{name}` exists with {key} {existing} and {_format_value(key, text)} was "
                "requested; request the existing value, or use another name"
            )
    required, limit = requested.required_bytes, requested.limit_bytes
    if existing_bytes < required or (limit and existing_bytes > limit):
        raise AlreadyExists(
            f"volume `{name}` exists with {existing_bytes} bytes and {required} to "
            f"{limit or 'any number of'} were requested; expand it, or use another name"
        )


def _format_value(key: str, value: object) -> str:
    if key in ("chunkSize", "stripe") and value == 0:
        return "default"
    return f"{value:04o}" if key == "mode" and isinstance(value, int) else str(value)


def check_path(name: str, path: str) -> str:
    """Check a path of the kubelet: absolute, without `..`, of bounded length."""
    if not path:
        raise InvalidArgument(f"{name} is missing")
    if len(path.encode(errors="replace")) > PATH_BYTES_MAX:
        raise InvalidArgument(f"{name} is longer than {PATH_BYTES_MAX} bytes")
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts or "." in parts or not path.isprintable():
        raise InvalidArgument(f"{name} is {path[:80]!r}; it must be an absolute path without `..`")
    return str(PurePosixPath(path))


class Id(Protocol):
    """An id with its text; ids are listed in the order of it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an id and check its parts."""


ListedId = TypeVar("ListedId", bound=Id)


def token_of(last: Id) -> str:
    """Return the token of the page after an id."""
    return base64.urlsafe_b64encode(str(last).encode()).decode()


def page_of(
    ids: Sequence[ListedId], starting_token: str, entries_max: int, kind: type[ListedId]
) -> tuple[list[ListedId], str]:
    """Return one page of sorted ids, and the token of the next page; empty at the end."""
    if entries_max < 0:
        raise InvalidArgument(f"max_entries is {entries_max}; it must not be negative")
    after = _token(starting_token, kind)
    remaining = [each for each in ids if str(each) > after]
    count = min(entries_max or PAGE_ENTRIES_MAX, PAGE_ENTRIES_MAX)
    page = remaining[:count]
    return page, token_of(page[-1]) if page and len(remaining) > count else ""


def _token(text: str, kind: type[Id]) -> str:
    if not text:
        return ""
    try:
        return str(kind.parse(base64.b64decode(text, altchars=b"-_", validate=True).decode()))
    except (binascii.Error, UnicodeDecodeError, ValueError, InvalidArgument) as error:
        raise StaleToken(
            f"starting_token {text[:40]!r} was not issued by this driver; restart the listing"
        ) from error
