"""`threefs doctor` on a machine whose mounts reply or hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from threefs.doctor.finding import Severity
from threefs.doctor.machine import check_machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from holding import HeldMount


def silent_mounts() -> list[str]:
    findings = [it for it in check_machine(Path("/")) if it.name == "mounts"]
    return [it.detail for it in findings if it.severity is Severity.PROBLEM]


def test_a_mount_whose_daemon_hangs_is_a_problem(mount: Callable[..., HeldMount]) -> None:
    held = mount("one")
    os.listdir(held.target)
    assert not [detail for detail in silent_mounts() if str(held.target) in detail]
    held.signal(signal.SIGSTOP)
    try:
        details = silent_mounts()
    finally:
        held.signal(signal.SIGCONT)
    assert [detail for detail in details if str(held.target) in detail]
