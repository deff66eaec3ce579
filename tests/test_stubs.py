"""Stubs of the compiled modules, compared with these by mypy's stubtest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("module", "folder"),
    [("hfreduce._native", "collectives/python"), ("threefs._native", "csi-3fs/python")],
)
def test_a_stub_describes_the_compiled_module(module: str, folder: str) -> None:
    """Every name and signature of the module is in its stub, and the other way round."""
    options = ["--concise", "--ignore-unused-allowlist"]
    options += ["--allowlist", "tests/stubtest_allowlist.txt"]
    command = [sys.executable, "-m", "mypy.stubtest", *options, module]
    environment = {**os.environ, "MYPYPATH": str(ROOT / folder)}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
