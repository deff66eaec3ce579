"""Reading sysfs without believing it.

A file may be missing, empty, huge, binary, a loop of links, a FIFO, or may fail in the middle of a
read (firmware that does not answer). In all cases the caller gets a value or None, and a `Finding`
describes the problem. Nothing outside the root is ever opened.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from flyer_node.inventory.model import Finding, FindingKind

__all__ = ["BYTES_MAX", "ENTRIES_MAX", "SysfsTree"]

BYTES_MAX = 4096
"""sysfs attributes are at most one page."""
ENTRIES_MAX = 4096
"""More entries than this in one folder are not expected on any node."""


class SysfsTree:
    """A sysfs tree below `root` (/sys, or a copy of one); collects findings as it reads.

    `refused` remembers attributes whose read failed, over several trees of one root: some firmware
    writes a line to the kernel's log for each read that it refuses, so they are read once.
    """

    def __init__(self, root: Path, refused: set[str] | None = None) -> None:
        self.root = Path(os.path.realpath(root))
        self.findings: list[Finding] = []
        self._refused = set() if refused is None else refused

    def found(self, kind: FindingKind, where: str, detail: str) -> None:
        """Notes a finding; `where` is relative to the root."""
        self.findings.append(Finding(kind, where, detail[:200]))

    def _inside(self, real: str, path: str) -> bool:
        """Whether a path without links is below the root; a finding if it is not."""
        inside = real.startswith(f"{self.root}/") or self.root == Path("/")
        if not inside:
            self.found(FindingKind.LOOP, path, "link leads out of the tree")
        return inside

    def names(self, folder: str, *, optional: bool = True) -> list[str]:
        """The sorted entries of a folder; none if it is absent."""
        try:
            real = os.path.realpath(self.root / folder, strict=True)
            if not self._inside(real, folder):
                return []
            names = sorted(entry.name for entry in Path(real).iterdir())
        except FileNotFoundError:
            if not optional:
                self.found(FindingKind.MISSING, folder, "no such folder")
            return []
        except OSError as error:
            self.found(_kind_of(error), folder, str(error.strerror))
            return []
        if len(names) > ENTRIES_MAX:
            self.found(FindingKind.MALFORMED, folder, f"{len(names)} entries, {ENTRIES_MAX} read")
        return names[:ENTRIES_MAX]

    def resolve(self, path: str) -> str | None:
        """Where a link leads, relative to the root; None with a finding if it leads nowhere."""
        try:
            real = os.path.realpath(self.root / path, strict=True)
        except OSError as error:
            self.found(_kind_of(error), path, f"link cannot be followed: {error}")
            return None
        return os.path.relpath(real, self.root) if self._inside(real, path) else None

    def text(self, path: str, *, optional: bool = False) -> str | None:
        """An attribute's text without surrounding blanks."""
        if path in self._refused:
            return None
        try:
            real = os.path.realpath(self.root / path, strict=True)
            if not self._inside(real, path):
                return None
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if not (optional and error.errno == errno.ENOENT):
                self.found(_kind_of(error), path, str(error.strerror))
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                self.found(FindingKind.MALFORMED, path, "not a regular file")
                return None
            raw = os.read(descriptor, BYTES_MAX)
        except OSError as error:
            self.found(FindingKind.UNREADABLE, path, str(error.strerror))
            self._refused.add(path)
            return None
        finally:
            os.close(descriptor)
        try:
            return raw.decode().strip("\0 \t\r\n")
        except UnicodeDecodeError:
            self.found(FindingKind.MALFORMED, path, f"not text: {raw[:40]!r}")
            return None

    def number(
        self,
        path: str,
        *,
        base: int = 10,
        low: int = 0,
        high: int = 2**63 - 1,
        optional: bool = False,
    ) -> int | None:
        """An attribute that is one number between low and high."""
        text = self.text(path, optional=optional)
        if text is None:
            return None
        try:
            value = int(text, base)
        except ValueError:
            self.found(FindingKind.MALFORMED, path, f"not a number: {text[:60]!r}")
            return None
        if not low <= value <= high:
            self.found(FindingKind.MALFORMED, path, f"{value} is outside {low} to {high}")
            return None
        return value

    def numa_node(self, folder: str) -> int | None:
        """`numa_node` of a device; -1 is unknown to the firmware."""
        path = f"{folder}/numa_node"
        node = self.number(path, low=-1, high=1023)
        if node == -1:
            self.found(FindingKind.MALFORMED, path, "-1: the firmware reports no NUMA node")
        return None if node is None or node < 0 else node


def _kind_of(error: OSError) -> FindingKind:
    if error.errno == errno.ELOOP:
        return FindingKind.LOOP
    return FindingKind.MISSING if error.errno == errno.ENOENT else FindingKind.UNREADABLE
