"""torch's own tests of its backends, over HFReduce: each ends as over Gloo, or is listed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
SECONDS = 1500
EXPECTED = json.loads((FOLDER / "torch_suite.json").read_text(encoding="utf-8"))
"""Results with 4 ranks and this release of torch. Over Gloo all but `failed`
passes, and the same tests are skipped with the same reasons."""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 30)
def test_the_suite_of_torch_has_the_same_results_as_over_gloo():
    pytest.importorskip("expecttest", reason="torch's tests import it; it is in our dev group")
    if not torch.__version__.startswith(EXPECTED["torch"]):
        pytest.skip(f"the list is of torch {EXPECTED['torch']}, this is {torch.__version__}")
    result = subprocess.run(
        [sys.executable, FOLDER / "torch_suite.py", "hfreduce", str(EXPECTED["ranks"])],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    results = json.loads(result.stdout.splitlines()[-1])
    failed = results["failed"]
    unexpected = [failed[name] for name in failed if name not in EXPECTED["failed"]]
    if unexpected:
        # In full: the tracebacks of the ranks are at the end of the first text.
        pytest.fail("\n".join(unexpected), pytrace=False)
    assert sorted(failed) == sorted(EXPECTED["failed"])
    assert results["skipped"] == EXPECTED["skipped"]
    assert sorted(results["passed"]) == EXPECTED["passed"]
