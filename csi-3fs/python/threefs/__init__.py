"""3FS: files, batch reads and writes, and checkpoints on a CRAQ file system.

``threefs.connect()`` gives a client of a running cluster; ``threefs serve --data DIR`` runs one on
this machine.
"""

from threefs._native import crc32c
from threefs.client import Client, Entry, FileSystemSpace, Quota, Stat, connect
from threefs.errors import (
    AlreadyServed,
    Corrupt,
    CrossQuota,
    DirectoryNotEmpty,
    Exists,
    InvalidArgument,
    IsADirectory,
    NoAttribute,
    NoSpace,
    NotADirectory,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    ReadOnly,
    Stale,
    ThreeFSError,
    Unavailable,
)

__all__ = [
    "AlreadyServed",
    "Client",
    "Corrupt",
    "CrossQuota",
    "DirectoryNotEmpty",
    "Entry",
    "Exists",
    "FileSystemSpace",
    "InvalidArgument",
    "IsADirectory",
    "NoAttribute",
    "NoSpace",
    "NotADirectory",
    "NotFound",
    "PermissionDenied",
    "Quota",
    "QuotaExceeded",
    "ReadOnly",
    "Stale",
    "Stat",
    "ThreeFSError",
    "Unavailable",
    "connect",
    "crc32c",
]
