"""Parts that all benchmarks share: progress, the measured machine, JSON files, process figures."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Final

__all__ = [
    "OUTPUT",
    "ROOT",
    "cpu_seconds",
    "machine",
    "peak_bytes",
    "read_json",
    "say",
    "utc",
    "write_json",
]

ROOT: Final = Path(__file__).resolve().parents[1]
OUTPUT: Final = ROOT / "build/bench"


def say(text: str) -> None:
    """Prints progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def utc() -> str:
    """The time, for a file."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def machine() -> dict[str, Any]:
    """Description of the measured environment."""
    return {"cpus": os.cpu_count(), "kernel": platform.release(), "processor": _processor()}


def read_json(path: Path) -> dict[str, Any]:
    """The document of an earlier run; empty if there is none."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Writes a document, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def peak_bytes(pid: int) -> int:
    """The peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    """The processor model as the kernel reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
