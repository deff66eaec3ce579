"""Volume ids that describe themselves: `v1:CLUSTER:/PARENT/NAME`. Pure.

An id says where the volume is, so the driver needs no table of volumes. It comes back from
Kubernetes, where anybody who may create a PersistentVolume can write one: every part is checked
before it is used as a path, and a volume must carry the driver's record besides (see `volumes`).
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
]

ID_BYTES_MAX = 128
"""The specification's bound for ids."""

NAME_BYTES_MAX = 128
"""The specification's bound for the name of a volume that is to be created."""

INLINE_PARENT = "/inline"
"""Where pods' inline volumes are: a directory a node, which no class and no claim may name."""

CLUSTER = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LEAF = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]{0,62}")
SEGMENT = re.compile(r"[A-Za-z0-9_][-A-Za-z0-9._]{0,62}")
DIGEST_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class VolumeId:
    """Where a volume is."""

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
        """The id of a volume that is to be created."""
        volume = cls(cluster, parent, directory_name(volume_name))
        if len(str(volume)) > ID_BYTES_MAX:
            raise InvalidArgument(
                f"parameters `cluster` and `path` (`{cluster}`, `{parent}`) make the volume's id "
                f"{len(str(volume))} bytes long and {ID_BYTES_MAX} are allowed; give a shorter path"
            )
        return volume

    @classmethod
    def looks_like(cls, text: str) -> bool:
        """Whether this driver may have made it; if not, no such volume was ever made."""
        return text.startswith("v1:")

    @classmethod
    def parse(cls, text: str) -> VolumeId:
        """The parts of an id, each checked."""

        def wrong(reason: str) -> InvalidArgument:
            shown = text if len(text) <= ID_BYTES_MAX else f"{text[:40]}… ({len(text)} characters)"
            return InvalidArgument(
                f"volume_id {shown!r} {reason}; ids of this driver are v1:CLUSTER:/PATH/NAME"
            )

        if len(text.encode(errors="replace")) > ID_BYTES_MAX:
            raise wrong(f"is longer than {ID_BYTES_MAX} bytes")
        version, _, rest = text.partition(":")
        cluster, _, path = rest.partition(":")
        if version != "v1" or not path:
            raise wrong("is not one of this driver")
        if not CLUSTER.fullmatch(cluster):
            raise wrong("names no cluster")
        parent, _, name = path.rpartition("/")
        if not LEAF.fullmatch(name):
            raise wrong("does not end in a volume's name")
        try:
            check_parent("volume_id", parent or "/")
        except InvalidArgument as error:
            raise wrong("has a path that is not absolute and plain") from error
        return cls(cluster, parent or "/", name)


def _is_inline(path: str) -> bool:
    return path == INLINE_PARENT or path.startswith(f"{INLINE_PARENT}/")


def directory_name(volume_name: str) -> str:
    """The directory of a volume of that name: the name where it is plain, else its digest."""
    if LEAF.fullmatch(volume_name) and not volume_name.startswith("sha256-"):
        return volume_name
    digest = hashlib.sha256(volume_name.encode()).hexdigest()[:DIGEST_CHARACTERS]
    return f"sha256-{digest}"


def check_name(name: str) -> str:
    """The name of a volume that is to be created."""
    if not name:
        raise InvalidArgument("name is missing; give the volume a name")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidArgument(
            f"name has {len(name.encode())} bytes and {NAME_BYTES_MAX} are allowed; shorten it"
        )
    return name


def check_cluster(name: str, value: str) -> str:
    """A cluster's name, as the folder of its settings has it."""
    if not CLUSTER.fullmatch(value):
        raise InvalidArgument(
            f"{name} is `{value[:80]}`; a cluster's name is lower-case letters, digits and dashes"
        )
    return value


def check_claims_parent(name: str, value: str) -> str:
    """A directory that volumes of claims are in."""
    if _is_inline(check_parent(name, value)):
        raise InvalidArgument(
            f"{name} is `{value[:80]}`; `{INLINE_PARENT}` is for pods' inline volumes: give another"
        )
    return value


def check_parent(name: str, value: str) -> str:
    """A directory that volumes are in: absolute, without `.`, `..` and empty parts."""
    if value == "/":
        return value
    parts = value.split("/")
    if parts[0] != "" or not all(SEGMENT.fullmatch(part) for part in parts[1:]):
        raise InvalidArgument(
            f"{name} is `{value[:80]}`; it must be an absolute path of plain names, as /volumes"
        )
    return value
