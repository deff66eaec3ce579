"""The script and the commands of docs/guides/read-a-trace.md."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from haiscale.__main__ import main

PAGE = Path(__file__).parents[4] / "docs/guides/read-a-trace.md"


@pytest.mark.torch
@pytest.mark.alone
def test_the_script_is_traced_under_torchrun(tmp_path, monkeypatch, capsys):
    """`python -m torch.distributed.run --nproc-per-node 2 traced.py`, then `haiscale trace`."""
    text = PAGE.read_text()
    script = re.search(r"file traced.py -->\n```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "traced.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "traced.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    monkeypatch.chdir(tmp_path)
    starts = []
    for arguments in re.findall(r"^haiscale (trace traces .*)$", text, re.MULTILINE):
        assert main(shlex.split(arguments)) == 0
        starts.append([line.split()[0] for line in capsys.readouterr().out.splitlines()])
    assert starts[0] == ["rank", "0", "1"]
    assert starts[1][1:4] == ["from", "0", "1"]
    for name in ("trace.svg", "trace.json", "heatmap.svg"):
        assert (tmp_path / name).stat().st_size > 1000
