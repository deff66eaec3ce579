"""torch's own tests of its backends, over ours: each ends as over Gloo, or is listed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
SECONDS = 1500
EXPECTED = json.loads((FOLDER / "torchs_own.json").read_text(encoding="utf-8"))
"""What passes, fails and is skipped with 4 ranks and torch's release; over Gloo all but `failed`
passes and the same is skipped, with the same reasons."""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 30)
def test_torchs_own_tests_end_as_over_gloo():
    pytest.importorskip("expecttest", reason="torch's tests import it; it is in our dev group")
    if not torch.__version__.startswith(EXPECTED["torch"]):
        pytest.skip(f"the list is of torch {EXPECTED['torch']}, this is {torch.__version__}")
    done = subprocess.run(
        [sys.executable, FOLDER / "torchs_own.py", "hfreduce", str(EXPECTED["ranks"])],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ended = json.loads(done.stdout.splitlines()[-1])
    failed = ended["failed"]
    unexpected = [failed[name] for name in failed if name not in EXPECTED["failed"]]
    if unexpected:
        # Whole: the ranks' own tracebacks are the last part of the first of them.
        pytest.fail("\n".join(unexpected), pytrace=False)
    assert sorted(failed) == sorted(EXPECTED["failed"])
    assert ended["skipped"] == EXPECTED["skipped"]
    assert sorted(ended["passed"]) == EXPECTED["passed"]
