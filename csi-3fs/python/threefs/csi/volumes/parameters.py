"""Parameters of a StorageClass, parsed and validated. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from threefs.csi.errors import InvalidArgument
from threefs.csi.volumes.volume_id import check_claims_parent, check_cluster
from threefs.durations import seconds_of
from threefs.errors import InvalidArgument as InvalidArgument3FS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DEFAULT_CLUSTER",
    "DEFAULT_PARENT",
    "KUBERNETES",
    "Parameters",
    "inodes_max",
    "parse_mutable",
    "quantity_bytes",
]

DEFAULT_CLUSTER = "default"
DEFAULT_PARENT = "/volumes"
KNOWN = ("cluster", "path", "uid", "gid", "mode", "chunkSize", "stripe", "inodes", "trash")
MUTABLE = ("inodes", "trash")
"""Those that a VolumeAttributesClass may change later."""
KUBERNETES = "csi.storage.k8s.io/"
"""Prefix of the parameters that the provisioner and the kubelet add; they are ignored."""

ID_MAX = (1 << 32) - 2
CHUNK_SIZES = (
    "64Ki",
    "128Ki",
    "256Ki",
    "512Ki",
    "1Mi",
    "2Mi",
    "4Mi",
    "8Mi",
    "16Mi",
    "32Mi",
    "64Mi",
)
STRIPE_MAX = 1024
INODES_MAX = 1 << 40
BYTES_PER_INODE = 16 << 10
"""Default ratio if the class sets no limit, as in ext4."""
INODES_MIN = 1024
INODES_DEFAULT_MAX = 1 << 24
"""Maximum of the default: the claim's author chooses the size, and metadata is shared."""
QUANTITY_CHARACTERS_MAX = 24
QUANTITY = re.compile(r"([0-9]+)(Ki|Mi|Gi|Ti|Pi|K|k|M|G|T|P)?")
UNITS = {
    None: 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "Pi": 1 << 50,
}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Where volumes of a class are created, and the owner, mode and layout of their root."""

    cluster: str = DEFAULT_CLUSTER
    path: str = DEFAULT_PARENT
    uid: int = 0
    gid: int = 0
    mode: int = 0o777
    chunk_bytes: int = 0
    """Bytes of a chunk of new files; 0: the default of the cluster."""
    stripe: int = 0
    """Number of chains over which a new file is spread; 0: the default of the cluster."""
    inodes: int = 0
    """Maximum number of files, directories and links of a volume; 0: one for every 16 KiB of its
    size, at most 16,777,216."""
    trash: int = 0
    """Seconds for which removed files are kept; 0: not."""

    @classmethod
    def parse(cls, volume_parameters: Mapping[str, str]) -> Parameters:
        """Parse the parameters of a class; an unknown one is an error."""
        volume_parameters = {
            name: text
            for name, text in volume_parameters.items()
            if not name.startswith(KUBERNETES)
        }
        unknown = sorted(name for name in volume_parameters if name not in KNOWN)
        if unknown:
            raise InvalidArgument(
                f"unknown parameter `{unknown[0][:80]}`; supported are {', '.join(KNOWN)}"
            )
        return cls(
            cluster=check_cluster(
                "parameter `cluster`", volume_parameters.get("cluster", DEFAULT_CLUSTER)
            ),
            path=check_claims_parent(
                "parameter `path`", volume_parameters.get("path", DEFAULT_PARENT)
            ),
            uid=_number("uid", volume_parameters.get("uid", "0"), 10, ID_MAX),
            gid=_number("gid", volume_parameters.get("gid", "0"), 10, ID_MAX),
            mode=_number("mode", volume_parameters.get("mode", "0777"), 8, 0o7777),
            **_layout(volume_parameters),
            **_limits(volume_parameters),
        )

    def as_record(self) -> dict[str, str | int]:
        """Return the part that is stored in the volume's record."""
        return {name: getattr(self, field) for name, field in RECORDED.items()}

    def with_record(self, record: Mapping[str, Any]) -> Parameters:
        """Return these parameters with the stored part of others."""
        fields: dict[str, Any] = {
            RECORDED[name]: int(value) for name, value in record.items() if name in RECORDED
        }
        return replace(self, **fields)


RECORDED = {
    "uid": "uid",
    "gid": "gid",
    "mode": "mode",
    "chunkSize": "chunk_bytes",
    "stripe": "stripe",
    "inodes": "inodes",
    "trash": "trash",
}
"""Fields of `Parameters` by their names in records."""


def parse_mutable(mutable_parameters: Mapping[str, str]) -> dict[str, int]:
    """Parse the parameters of a VolumeAttributesClass: fields of `Parameters` with new values."""
    fixed = sorted(name for name in mutable_parameters if name not in MUTABLE)
    if fixed:
        raise InvalidArgument(
            f"mutable_parameters: `{fixed[0][:80]}` cannot be changed; a VolumeAttributesClass may "
            f"have {' and '.join(MUTABLE)}"
        )
    return _limits(mutable_parameters)


def _layout(parameters: Mapping[str, str]) -> dict[str, int]:
    values = {}
    if (size := parameters.get("chunkSize")) is not None:
        if size not in CHUNK_SIZES:
            raise InvalidArgument(
                f"parameter `chunkSize` is `{size[:80]}`; it must be one of "
                f"{', '.join(CHUNK_SIZES)}"
            )
        values["chunk_bytes"] = quantity_bytes("parameter `chunkSize`", size)
    if (stripe := parameters.get("stripe")) is not None:
        values["stripe"] = _number("stripe", stripe, 10, STRIPE_MAX)
        if values["stripe"] == 0:
            raise InvalidArgument(
                f"parameter `stripe` is `{stripe}`; it must be from 1 to {STRIPE_MAX}, or absent "
                "for the default of the cluster"
            )
    return values


def _limits(parameters: Mapping[str, str]) -> dict[str, int]:
    values = {}
    if (inodes := parameters.get("inodes")) is not None:
        values["inodes"] = _number("inodes", inodes, 10, INODES_MAX)
    if (trash := parameters.get("trash")) is not None:
        values["trash"] = _duration("trash", trash)
    return values


def inodes_max(size_bytes: int, requested: int) -> int:
    """Return the inode limit of a volume; every volume has one, because metadata is shared.

    `requested` is the class's parameter; 0 derives the limit from the volume's size.
    """
    return requested or min(max(INODES_MIN, size_bytes // BYTES_PER_INODE), INODES_DEFAULT_MAX)


def quantity_bytes(name: str, text: str) -> int:
    """Parse a Kubernetes quantity such as 10Gi."""
    match = QUANTITY.fullmatch(text) if len(text) <= QUANTITY_CHARACTERS_MAX else None
    if match is None or int(match[1]) == 0:
        raise InvalidArgument(f"{name} is `{text[:80]}`; give a quantity such as 10Gi")
    return int(match[1]) * UNITS[match[2]]


def _duration(name: str, text: str) -> int:
    if text == "0":
        return 0
    try:
        return seconds_of(f"parameter `{name}`", text)
    except InvalidArgument3FS as error:
        raise InvalidArgument(error.message) from error


def _number(name: str, text: str, base: int, largest: int) -> int:
    digits = "01234567" if base == 8 else "0123456789"
    if not text or len(text) > 13 or any(letter not in digits for letter in text):
        expected = "an octal mode such as 0770" if base == 8 else "a number such as 1000"
        raise InvalidArgument(f"parameter `{name}` is `{text[:80]}`; it must be {expected}")
    if int(text, base) > largest:
        raise InvalidArgument(f"parameter `{name}` is `{text}`; it must be at most {largest}")
    return int(text, base)
