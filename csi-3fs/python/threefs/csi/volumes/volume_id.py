"""Volume ids that describe themselves: `v1:CLUSTER:/PARENT/NAME`. Pure.

An id contains the location of the volume, so the driver needs no table of volumes. Any user who may
create a PersistentVolume in Kubernetes can write one: every part is checked before it is used as a
path, and a volume must also carry the driver's record (see `volumes`).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from threefs.csi.errors import InvalidArgument

__all__ = [
    "ID_BYTES_MAX",
    "INLINE_PARENT",
    "NAME_BYTES_MAX",
    "VolumeId",
    "check_claims_parent",
    "check_cluster",
    "check_name",
    "check_parent",
    "directory_name",
    "invalid_id",
    "split_id",
]

ID_BYTES_MAX = 128
"""Limit of the specification for ids."""

NAME_BYTES_MAX = 128
"""Limit of the specification for names in CreateVolume."""

INLINE_PARENT = "/inline"
"""Parent of inline volumes, with one directory per node; classes and claims may not name it."""

CLUSTER = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LEAF = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]{0,62}")
SEGMENT = re.compile(r"[A-Za-z0-9_][-A-Za-z0-9._]{0,62}")
DIGEST_CHARACTERS = 40
FORM = "v1:CLUSTER:/PATH/NAME"


@dataclass(frozen=True, slots=True)
class VolumeId:
    """Location of a volume."""

    cluster: str
    parent: str
    name: str

    @property
    def path(self) -> str:
        """The volume's directory in 3FS."""
        return f"{self.parent.rstrip('/')}/{self.name}"

    @property
    def is_inline(self) -> bool:
        """Whether it is a pod's inline volume, which only that pod may use."""
        return _is_inline(self.parent)

    def __str__(self) -> str:
        return f"v1:{self.cluster}:{self.path}"

    @classmethod
    def make(cls, cluster: str, parent: str, volume_name: str) -> VolumeId:
        """Return the id of a volume to create."""
        volume = cls(cluster, parent, directory_name(volume_name))
        if len(str(volume)) > ID_BYTES_MAX:
            raise InvalidArgument(
                f"parameters `cluster` and `path` (`{cluster}`, `{parent}`) make the volume's id "
                f"{len(str(volume))} bytes long and {ID_BYTES_MAX} are allowed; give a shorter path"
            )
        return volume

    @classmethod
    def looks_like(cls, text: str) -> bool:
        """Whether it has the form of this driver's ids; otherwise no such volume exists."""
        return text.startswith("v1:")

    @classmethod
    def parse(cls, text: str) -> VolumeId:
        """Parse an id and check its parts."""
        cluster, path = split_id("volume_id", FORM, text)
        parent, _, name = path.rpartition("/")
        if not LEAF.fullmatch(name):
            raise invalid_id("volume_id", FORM, text, "does not end in a volume's name")
        try:
            check_parent("volume_id", parent or "/")
        except InvalidArgument as error:
            reason = "has a path that is not absolute and plain"
            raise invalid_id("volume_id", FORM, text, reason) from error
        return cls(cluster, parent or "/", name)


def split_id(field: str, form: str, text: str) -> tuple[str, str]:
    """Check length, version and cluster of an id `v1:CLUSTER:REST`; return cluster and rest."""
    if len(text.encode(errors="replace")) > ID_BYTES_MAX:
        raise invalid_id(field, form, text, f"is longer than {ID_BYTES_MAX} bytes")
    version, _, rest = text.partition(":")
    cluster, _, rest = rest.partition(":")
    if version != "v1" or not rest:
        raise invalid_id(field, form, text, "is not an id of this driver")
    if not CLUSTER.fullmatch(cluster):
        raise invalid_id(field, form, text, "has an invalid cluster")
    return cluster, rest


def invalid_id(field: str, form: str, text: str, reason: str) -> InvalidArgument:
    """Return the error for an id in a request."""
    excerpt = text if len(text) <= ID_BYTES_MAX else f"{text[:40]}… ({len(text)} characters)"
    return InvalidArgument(f"{field} {excerpt!r} {reason}; ids of this driver are {form}")


def _is_inline(path: str) -> bool:
    return path == INLINE_PARENT or path.startswith(f"{INLINE_PARENT}/")


def directory_name(volume_name: str) -> str:
    """Return the directory name of a volume: its name if that is plain, otherwise a digest."""
    if LEAF.fullmatch(volume_name) and not volume_name.startswith("sha256-"):
        return volume_name
    digest = hashlib.sha256(volume_name.encode()).hexdigest()[:DIGEST_CHARACTERS]
    return f"sha256-{digest}"


def check_name(name: str) -> str:
    """Check the name of a volume to create."""
    if not name:
        raise InvalidArgument("name is missing; give the volume a name")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidArgument(
            f"name has {len(name.encode())} bytes and {NAME_BYTES_MAX} are allowed; shorten it"
        )
    return name


def check_cluster(name: str, value: str) -> str:
    """Check a cluster's name, which is also the name of its folder."""
    if not CLUSTER.fullmatch(value):
        raise InvalidArgument(
            f"{name} is `{value[:80]}`; a cluster's name is lower-case letters, digits and dashes"
        )
    return value


def check_claims_parent(name: str, value: str) -> str:
    """Check the parent directory of volumes for claims."""
    if _is_inline(check_parent(name, value)):
        raise InvalidArgument(
            f"{name} is `{value[:80]}`; `{INLINE_PARENT}` is for pods' inline volumes: give another"
        )
    return value


def check_parent(name: str, value: str) -> str:
    """Check a parent directory: absolute, without `.`, `..` and empty parts."""
    if value == "/":
        return value
    parts = value.split("/")
    if parts[0] != "" or not all(SEGMENT.fullmatch(part) for part in parts[1:]):
        raise InvalidArgument(
            f"{name} is `{value[:80]}`; it must be an absolute path of plain names such as /volumes"
        )
    return value
