"""The script of docs/guides/shard-a-model.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs/guides/shard-a-model.md"


@pytest.mark.torch
@pytest.mark.alone
def test_the_script_runs_under_torchrun(tmp_path):
    """`python -m torch.distributed.run --nproc-per-node 4 sharded.py`."""
    script = re.search(r"file sharded.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "sharded.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "sharded.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    # Ranks share the pipe: a newline may come after another rank's text.
    line = r"rank (\d) holds 8320 of 16640, whole step: None"
    assert sorted(re.findall(line, result.stdout)) == list("0123"), result.stdout
