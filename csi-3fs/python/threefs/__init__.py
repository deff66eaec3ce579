"""3FS: files, batch reads and writes, and checkpoints on a CRAQ file system.

``threefs.connect()`` gives a client of a running cluster; ``threefs serve --data DIR`` runs one on
this machine.
"""

from threefs._native import crc32c
from threefs.client import Client, Entry, Stat, connect
from threefs.errors import (
    AlreadyServed,
    Corrupt,
    DirectoryNotEmpty,
    Exists,
    InvalidArgument,
    IsADirectory,
    NoSpace,
    NotADirectory,
    NotFound,
    PermissionDenied,
    ThreeFSError,
    Unavailable,
)

__all__ = [
    "AlreadyServed",
    "Client",
    "Corrupt",
    "DirectoryNotEmpty",
    "Entry",
    "Exists",
    "InvalidArgument",
    "IsADirectory",
    "NoSpace",
    "NotADirectory",
    "NotFound",
    "PermissionDenied",
    "Stat",
    "ThreeFSError",
    "Unavailable",
    "connect",
    "crc32c",
]
