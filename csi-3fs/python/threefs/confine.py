"""Privilege drop of this process, permanent, before it reads data from the network."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from threefs.errors import InvalidArgument
from threefs.system_calls import refuse_system_calls

__all__ = ["DATA_BYTES_MAX", "confine"]

DATA_BYTES_MAX = 1 << 30
"""Private memory of a confined FUSE daemon, which handles at most 256 requests of 1 MiB."""
OOM_SCORE = 800
"""When memory is short, the kernel kills a daemon, which is replaced, before the mount manager."""
PR_SET_NO_NEW_PRIVS = 38


def confine(user: int) -> None:
    """Continue as this user and group without capabilities, with bounded memory and system calls.

    Call it before the first thread is started: no_new_privs and the seccomp filter apply to the
    calling thread and to threads that it starts later.
    """
    if user <= 0:
        raise InvalidArgument(f"--user is {user}; give the id of a user that is not root")
    if os.geteuid() != 0:
        raise InvalidArgument(f"--user {user}: only root may become another user")
    # Before the change of user: afterwards /proc/self belongs to root.
    Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    # The mount manager has lowered the limit of a daemon outside a control group.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    data = DATA_BYTES_MAX if most == resource.RLIM_INFINITY else min(DATA_BYTES_MAX, most)
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.setgroups([])
    os.setresgid(user, user, user)
    # The kernel clears every capability of a process that leaves uid 0.
    os.setresuid(user, user, user)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    refuse_system_calls()
