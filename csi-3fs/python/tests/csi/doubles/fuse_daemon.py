"""A small FUSE daemon with the options of `threefs fuse`: shows one file, `hello`.

With `--write-back` the kernel caches writes; the data that it sends later is stored in the file
`STATE.written`.

The content of the file changes with each start, so that tests see which daemon answers. It
implements the kernel's protocol (linux/fuse.h, version 7.31) as far as reading a file needs it.
"""

from __future__ import annotations

import argparse
import errno
import os
import stat
import struct
import sys
import time

__all__ = ["main"]

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, DESTROY, BATCH_FORGET, INTERRUPT = 26, 27, 28, 29, 38, 42, 36
SETATTR, WRITE, FSYNC = 4, 16, 20
WRITE_IN = struct.Struct("<QQIIQII")
WRITEBACK_CACHE = 1 << 16
KNOWN_SECONDS = 3600
DIRECT_IO = 1
ROOT, FILE = 1, 2
WRITE_BYTES_MAX = 128 << 10
UNIQUE_RESEND = 1 << 63
NOTIFY_RESEND = 7


def main() -> int:
    """Serve until the mount ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--root", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--state")
    parser.add_argument("--claim-for")
    parser.add_argument("--user", type=int)
    parser.add_argument("--write-back", action="store_true")
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fail", action="store_true", help="end before it is ready")
    options = parser.parse_args()
    if options.user:
        os.setgroups([])
        os.setresgid(options.user, options.user, options.user)
        os.setresuid(options.user, options.user, options.user)
    if options.fail:
        sys.stderr.write(f"cannot reach the cluster of {options.cluster}\n")
        return 1
    if options.resume:
        # The kernel resends requests that the previous daemon did not answer.
        try:
            os.write(options.fd, OUT_HEADER.pack(OUT_HEADER.size, NOTIFY_RESEND, 0))
        except OSError as error:
            sys.stderr.write(f"resend: {error}\n")
    sys.stdout.write('{"serving": true}\n')
    sys.stdout.flush()
    text = f"{os.getpid()} {options.root}\n".encode()
    written_path = f"{options.state}.written" if options.write_back else ""
    return _serve(options.fd, text, written_path)


def _serve(descriptor: int, text: bytes, written_path: str) -> int:
    while True:
        try:
            request = os.read(descriptor, WRITE_BYTES_MAX + 4096)
        except InterruptedError:
            continue
        except OSError as error:
            # ENODEV: unmounted. ENOENT: the request was interrupted before it was read.
            if error.errno == errno.ENOENT:
                continue
            return 0
        _, operation, unique, node, *_ = IN_HEADER.unpack_from(request)
        body = request[IN_HEADER.size :]
        if operation in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        status, reply = _answer(operation, node, body, text, written_path)
        header = OUT_HEADER.pack(OUT_HEADER.size + len(reply), -status, unique)
        try:
            os.write(descriptor, header + reply)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise
        if operation == DESTROY:
            return 0


def _answer(
    operation: int, node: int, body: bytes, text: bytes, written_path: str
) -> tuple[int, bytes]:
    # With cached attributes the kernel accepts writes while no daemon serves.
    valid_seconds = KNOWN_SECONDS if written_path else 0
    if operation == INIT:
        flags = WRITEBACK_CACHE if written_path else 0
        answer = struct.pack(
            "<IIIIHHIIHHI", 7, 31, 65536, flags, 8, 8, WRITE_BYTES_MAX, 1, 32, 0, 0
        )
        return 0, answer.ljust(64, b"\0")
    if operation in (GETATTR, SETATTR):
        return 0, struct.pack("<QII", valid_seconds, 0, 0) + _attributes(node, text)
    if operation == LOOKUP:
        if node == ROOT and body.rstrip(b"\0") == b"hello":
            return 0, struct.pack("<QQQQII", FILE, 0, 0, valid_seconds, 0, 0) + _attributes(
                FILE, text
            )
        return errno.ENOENT, b""
    if operation in (OPEN, OPENDIR):
        return 0, struct.pack("<QII", 1, 0 if written_path else DIRECT_IO, 0)
    if operation == READ:
        _, offset, size = struct.unpack_from("<QQI", body)
        return 0, text[offset : offset + size]
    if operation == READDIR:
        _, offset, _ = struct.unpack_from("<QQI", body)
        return 0, b"" if offset else _entries()
    if operation == STATFS:
        return 0, struct.pack("<QQQQQIIII", 1, 1, 1, 1, 1, 4096, 255, 4096, 0).ljust(80, b"\0")
    if operation == WRITE and written_path:
        _, offset, size, *_ = WRITE_IN.unpack_from(body)
        descriptor = os.open(written_path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(descriptor, body[WRITE_IN.size :][:size], offset)
        os.close(descriptor)
        return 0, struct.pack("<II", size, 0)
    if operation in (RELEASE, RELEASEDIR, FLUSH, FSYNC, DESTROY):
        return 0, b""
    return errno.ENOSYS, b""


def _attributes(node: int, text: bytes) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
    size, now = len(text), int(time.time())
    return ATTRIBUTES.pack(node, size, 1, now, now, now, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _entries() -> bytes:
    entries = b""
    for offset, (name, node, kind) in enumerate(
        [(b".", ROOT, 4), (b"..", ROOT, 4), (b"hello", FILE, 8)], start=1
    ):
        entry = struct.pack("<QQII", node, offset, len(name), kind) + name
        entries += entry.ljust((len(entry) + 7) & ~7, b"\0")
    return entries


if __name__ == "__main__":
    sys.exit(main())
