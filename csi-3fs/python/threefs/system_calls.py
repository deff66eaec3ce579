"""Seccomp filter of a confined process (seccomp(2)).

It refuses calls that a FUSE daemon never makes and that would let it attack the kernel or other
processes: starting programs, namespaces, mounts, keys, BPF, io_uring, tracing. They return EPERM.
Calls that are newer than this list return ENOSYS, as from an older kernel. A call with the numbers
of another architecture ends the process. The filter cannot be removed.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ARCHITECTURES", "LAST_KNOWN", "REFUSED", "program", "refuse_system_calls"]

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine → column of its numbers in the table below, and its AUDIT_ARCH (linux/audit.h)."""
# fmt: off
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "setns": (308, 268), "unshare": (272, 97), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "swapon": (167, 224), "swapoff": (168, 225),
    "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "acct": (163, 89), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "syslog": (103, 116),
    "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "vhangup": (153, 58), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "splice": (275, 76), "tee": (276, 77),
    "vmsplice": (278, 75), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "shmdt": (67, 197), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
}
# fmt: on
"""Calls refused with EPERM: numbers on x86_64 and aarch64; None: the call does not exist."""
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
LAST_KNOWN = 462
"""The highest number when this list was made (Linux 6.10)."""
CLONE_THREAD = 0x10000
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
NETLINK, NETLINK_ROUTE = 16, 0
"""Netlink family that the resolver uses to list the addresses of this machine."""

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, GREATER, SOME_BITS, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
INSTRUCTION = struct.Struct("=HBBI")


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_system_calls() -> bool:
    """Install the filter in this thread and all that it starts; false on another architecture.

    The process must have set no_new_privs before.
    """
    if platform.machine() not in ARCHITECTURES:
        return False
    code = program(platform.machine())
    filter_program = _Program(len(code) // INSTRUCTION.size, code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
    return True


def program(machine: str) -> bytes:
    """The filter in classic BPF (linux/filter.h)."""
    return b"".join(
        INSTRUCTION.pack(*instruction) for instruction in _instructions(*ARCHITECTURES[machine])
    )


def _instructions(column: int, architecture: int) -> Iterator[tuple[int, int, int, int]]:
    """Code, jump if true, jump if false, value; a jump is the number of skipped instructions."""
    refuse = (RETURN, 0, 0, ERRNO | errno.EPERM)
    unknown = (RETURN, 0, 0, ERRNO | errno.ENOSYS)
    allow = (RETURN, 0, 0, ALLOW)
    yield LOAD, 0, 0, ARCHITECTURE_AT
    yield EQUAL, 1, 0, architecture
    yield RETURN, 0, 0, KILL
    yield LOAD, 0, 0, NUMBER_AT
    # Calls of x32 have a bit set that is above all numbers.
    yield GREATER, 0, 1, LAST_KNOWN
    yield unknown
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            yield EQUAL, 0, 1, number
            yield refuse
    # The flags of clone3 are in memory, which a filter cannot read: the C library then uses clone.
    yield EQUAL, 0, 1, CLONE3[column]
    yield unknown
    # Allow new threads, but no new processes.
    yield EQUAL, 0, 4, CLONE[column]
    yield LOAD, 0, 0, ARGUMENTS_AT
    yield SOME_BITS, 0, 1, CLONE_THREAD
    yield allow
    yield refuse
    yield EQUAL, 1, 0, SOCKET[column]
    yield allow
    yield LOAD, 0, 0, ARGUMENTS_AT
    for family in FAMILIES:
        yield EQUAL, 0, 1, int(family)
        yield allow
    yield EQUAL, 0, 3, NETLINK
    yield LOAD, 0, 0, ARGUMENTS_AT + 16
    yield EQUAL, 0, 1, NETLINK_ROUTE
    yield allow
    yield RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT
