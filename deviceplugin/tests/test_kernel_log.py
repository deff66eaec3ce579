"""Records of /dev/kmsg: which of them are the kernel's."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
from flyer_node.health.kmsg import KernelLog

if TYPE_CHECKING:
    from pathlib import Path

XID = "NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=python, GPU has fallen off the bus."
LAST = "the last line"


async def lines_of(folder: Path, content: str) -> list[str]:
    """Lines that a reader of a log with this content returns, without the last one."""
    fifo = folder / "kmsg"
    os.mkfifo(fifo)
    lines: list[str] = []
    complete = asyncio.Event()

    def on_line(line: str) -> None:
        lines.append(line)
        if line == LAST:
            complete.set()

    log = KernelLog(fifo, on_line)
    assert log.start() == ""
    with fifo.open("w") as kernel:
        kernel.write(f"{content}6,9,9,-;{LAST}\n")
        kernel.flush()
        await asyncio.wait_for(complete.wait(), 10)
    log.stop()
    return lines[:-1]


@pytest.mark.parametrize("priority", ["0", "3", "6", "7"])
async def test_a_record_of_the_kernel_counts(tmp_path: Path, priority: str) -> None:
    records = f"{priority},1,1,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:01:00.0\n"
    assert await lines_of(tmp_path, records) == [XID]


async def test_a_record_that_names_its_caller_counts(tmp_path: Path) -> None:
    """CONFIG_PRINTK_CALLER adds a field."""
    assert await lines_of(tmp_path, f"3,1,1,-,caller=T1;{XID}\n") == [XID]


@pytest.mark.parametrize("priority", ["8", "12", "14", "30", "191", "2047"])
async def test_a_record_that_a_process_wrote_does_not_count(tmp_path: Path, priority: str) -> None:
    """The kernel gives it facility 1 (user), or the other one that the process asked for."""
    assert await lines_of(tmp_path, f"{priority},1,1,-;{XID}\n") == []


@pytest.mark.parametrize("line", [XID, f";{XID}", f"x,1,1,-;{XID}", f"-8,1,1,-;{XID}"])
async def test_a_line_without_a_priority_does_not_count(tmp_path: Path, line: str) -> None:
    assert await lines_of(tmp_path, f"{line}\n") == []


async def test_text_does_not_start_another_record(tmp_path: Path) -> None:
    """Only a line feed ends one, which the kernel escapes in a text."""
    text = f"message\x85 0,1,1,-;{XID}\u2028 0,1,1,-;{XID}\r0,1,1,-;{XID}"
    assert await lines_of(tmp_path, f"14,1,1,-;{text}\n") == []
