"""The kernel's mount table. Reading it sends no request to a file system, so it cannot hang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["FILE_SYSTEM", "SOURCE_PREFIX", "MountEntry", "parse", "read"]

FILE_SYSTEM = "fuse.hf3fs"
"""Type of a mount, by which programs recognize mounts with rings."""
FORMER_FILE_SYSTEM = "fuse.threefs"
"""Type of mounts that an older mount manager has made and this one takes over."""
SOURCE_PREFIX = "3fs:"
"""Prefix of the volume's id in a mount's source: the table shows which volume is mounted where."""


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of the mount table."""

    target: str
    device: str
    """major:minor; the minor is the number of the FUSE connection."""
    kind: str
    source: str
    read_only: bool

    @property
    def volume(self) -> str | None:
        """The volume's id, if it is a mount of this driver."""
        if self.kind in (FILE_SYSTEM, FORMER_FILE_SYSTEM) and self.source.startswith(SOURCE_PREFIX):
            return self.source.removeprefix(SOURCE_PREFIX)
        return None


def read(path: str = "/proc/self/mountinfo") -> list[MountEntry]:
    """Return the table of this mount namespace, in the order in which mounts were made."""
    return parse(Path(path).read_text(errors="surrogateescape"))


def parse(text: str) -> list[MountEntry]:
    """Parse lines as described in proc(5); a malformed line is skipped."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        front, back = before.split(), after.split(" ")
        if not separator or len(front) < 6 or len(back) < 2:
            continue
        options = front[5].split(",")
        mounts.append(
            MountEntry(
                target=_plain(front[4]),
                device=front[2],
                kind=back[0],
                source=_plain(back[1]),
                read_only="ro" in options,
            )
        )
    return mounts


def _plain(text: str) -> str:
    """Decode the table's octal escapes of white space and backslashes."""
    if "\\" not in text:
        return text
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text
