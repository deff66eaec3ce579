"""The script of docs/guides/save-and-load-any-layout.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs/guides/save-and-load-any-layout.md"


@pytest.mark.torch
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_the_script_continues_on_another_number_of_ranks(tmp_path):
    """`python -m torch.distributed.run --nproc-per-node 4 anylayout.py`, then with 2."""
    script = re.search(r"file anylayout.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "anylayout.py").write_text(script[1])
    for ranks, steps in ((4, "0 to 3"), (2, "4 to 7")):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "anylayout.py"]
        result = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
        assert result.returncode == 0, result.stderr[-2000:]
        # Ranks share the pipe: a newline may come after another rank's text.
        reported = re.findall(r"rank (\d) trained steps (\d to \d)", result.stdout)
        assert sorted(reported) == [(str(rank), steps) for rank in range(ranks)]
