"""The C library of rings, and C programs that use it."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
CRATE = ROOT / "csi-3fs" / "crates" / "threefs-usrbio"
NAME = "libhf3fs_api_shared.so"


@cache
def library() -> Path:
    """The library, built if necessary."""
    if shutil.which("cargo") is None or shutil.which("cc") is None:
        pytest.skip("needs cargo and a C compiler")
    build = ["cargo", "build", "--quiet", "--locked", "-p", "threefs-usrbio"]
    subprocess.run(build, cwd=ROOT, check=True, timeout=600)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / "debug" / NAME


def compiled(source: Path, folder: Path, *flags: str) -> Path:
    """A C program that is linked with the library."""
    program = folder / source.stem
    command = [
        *("cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I", str(CRATE / "include")),
        *(str(source), "-o", str(program), "-L", str(library().parent)),
        *(f"-Wl,-rpath,{library().parent}", "-lhf3fs_api_shared", *flags),
    ]
    subprocess.run(command, check=True, timeout=120)
    return program


def run(program: Path, *arguments: object, user: int | None = None) -> None:
    """Run a program to its end; it must succeed."""
    words = [str(program), *map(str, arguments)]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=120, user=user, group=user
    )
    assert done.returncode == 0, done.stderr
