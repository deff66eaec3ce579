"""The script of docs/guides/experts-and-tensors.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs/guides/experts-and-tensors.md"


@pytest.mark.torch
@pytest.mark.alone
def test_the_script_runs_under_torchrun(tmp_path):
    """`python -m torch.distributed.run --nproc-per-node 4 experts.py`, without FLYER_TOPOLOGY."""
    script = re.search(r"file experts.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "experts.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "experts.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    # Ranks share the pipe: a newline may come after another rank's text.
    reported = sorted(re.findall(r"rank (\d) loss (\d\.\d\d), tokens (\d+)", result.stdout))
    assert [rank for rank, _, _ in reported] == ["0", "1", "2", "3"]
    assert {tokens for _, _, tokens in reported} == {str(4 * 200 * 4)}
    assert all(float(loss) < 1.0 for _, loss, _ in reported)
