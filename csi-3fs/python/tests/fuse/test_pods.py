"""Mounts as pods see them: other PID namespaces, and groups that only the kernel can resolve."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import errno, os, sys
uid, gid, groups = int(sys.argv[1]), int(sys.argv[2]), [int(g) for g in sys.argv[3].split(",") if g]
os.setgroups(groups); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
try:
    exec(sys.argv[4])
except OSError as error:
    print(errno.errorcode[error.errno])
else:
    print("done")
"""


def in_a_pod(at: Path, uid: int, gid: int, groups: str, code: str) -> str:
    """Run in another PID namespace, where the daemon cannot see the process."""
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    program = [sys.executable, "-I", "-S", "-c", PROGRAM, str(uid), str(gid), groups, code]
    result = subprocess.run(
        [*command, *program], cwd=at, capture_output=True, text=True, timeout=60, check=False
    )
    if "unshare failed" in result.stderr:
        pytest.skip("PID namespaces cannot be created here")
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_supplementary_groups_count_in_another_pid_namespace(tree: Path) -> None:
    """The class of a team: uid 1000, gid 2000, mode 2770; pods have it as a supplementary group."""
    team = tree / "team"
    team.mkdir()
    os.chown(team, 1000, 2000)
    team.chmod(0o2770)
    creation = "open('made', 'x').write('x'); os.mkdir('folder'); os.symlink('made', 'link')"
    assert in_a_pod(team, 1001, 1001, "2000", creation) == "done"
    assert (team / "made").stat().st_gid == 2000
    work = (
        "os.listdir('.'); open('made').read(); os.rename('made', 'other'); os.link('other', 'two');"
        "os.unlink('two'); os.rmdir('folder'); os.setxattr('other', 'user.x', b'1')"
    )
    assert in_a_pod(team, 1001, 1001, "2000", work) == "done"
    (team / "shared").write_bytes(b"from root")
    os.chown(team / "shared", 1000, 2000)
    (team / "shared").chmod(0o660)
    change = "f = open('shared', 'r+'); f.write('by group'); f.truncate(3)"
    assert in_a_pod(team, 1001, 1001, "2000", change) == "done"
    assert in_a_pod(team, 1001, 1001, "7,2000", "os.truncate('shared', 1)") == "done"
    # Another group grants no access, and no group grants the rights of the owner.
    for code in ("os.listdir('.')", "open('shared')", "open('new', 'x')", "os.unlink('shared')"):
        assert in_a_pod(team, 1002, 1002, "2001", code) == "EACCES", code
    assert in_a_pod(team, 1001, 1001, "2000", "os.chmod('shared', 0o777)") == "EPERM"
    assert in_a_pod(team, 1001, 1001, "2000", "os.chown('shared', 1001, -1)") == "EPERM"
    os.chmod(team / "shared", 0o606)
    assert in_a_pod(team, 1001, 1001, "2000", "open('shared')") == "EACCES", "its class decides"
    ownership = "os.close(os.open('mine', os.O_CREAT, 0o600)); os.chown('mine', -1, 3000)"
    assert in_a_pod(team, 1001, 1001, "2000,3000", ownership) == "done"
    assert in_a_pod(team, 1001, 1001, "2000", "os.chown('mine', -1, 4000)") == "EPERM"
