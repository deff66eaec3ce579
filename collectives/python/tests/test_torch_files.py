"""Test files of torch's sources over our backend: each test ends as over Gloo, or is listed.

The files are not part of the wheel. TORCH_SOURCES names a checkout of torch's sources at the
installed release::

    TORCH_SOURCES=~/pytorch pytest -m torch collectives/python/tests/test_torch_files.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LISTED = json.loads((FOLDER / "torch_files.json").read_text(encoding="utf-8"))
SECONDS = 900


def endings(backend: str, sources: Path, file: str) -> dict[str, str]:
    """How each test of a file ended over a backend, by class and name."""
    done = subprocess.run(
        [sys.executable, FOLDER / "torch_files.py", backend, sources / "test/distributed", file],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ended = json.loads(done.stdout.splitlines()[-1])
    return {
        ".".join(test.split(".")[-2:]): ending
        for ending in ("passed", "failed", "skipped")
        for test in ended[ending]
    }


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 30)
@pytest.mark.parametrize("file", LISTED["files"])
def test_torchs_files_end_as_over_gloo(file: str) -> None:
    if "TORCH_SOURCES" not in os.environ:
        pytest.skip("TORCH_SOURCES names no checkout of torch's sources")
    pytest.importorskip("expecttest", reason="torch's tests import it; it is in our dev group")
    sources = Path(os.environ["TORCH_SOURCES"])
    gloo, ours = (endings(backend, sources, file) for backend in ("gloo", "hfreduce"))
    assert gloo.keys() == ours.keys()
    differ = {test: (gloo[test], ours[test]) for test in gloo if gloo[test] != ours[test]}
    unlisted = {test: ends for test, ends in differ.items() if test not in LISTED["differ"]}
    assert not unlisted
    # What no longer differs leaves the list.
    same = [test for test in LISTED["differ"] if test in gloo and test not in differ]
    assert not same
