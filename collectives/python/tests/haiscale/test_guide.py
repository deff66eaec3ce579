"""The script and the messages of docs/guides/choose-a-layout.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from haiscale.placement import LayoutError, Nodes, Sizes, place

PAGE = Path(__file__).parents[4] / "docs/guides/choose-a-layout.md"
ROW = re.compile(r"^\| `([a-z0-9=, ]+)` \| `(rule .+)` \|$", re.MULTILINE)


@pytest.mark.torch
@pytest.mark.alone
def test_the_script_runs_under_torchrun(tmp_path):
    """`python -m torch.distributed.run --nproc-per-node 4 layout.py`, without FLYER_TOPOLOGY."""
    script = re.search(r"file layout.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "layout.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "layout.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    # Ranks share the pipe: a newline may come after another rank's text.
    reported = sorted(re.findall(r"rank (\d) reads part (\d) of 4", result.stdout))
    assert reported == [(str(rank), str(rank)) for rank in range(4)]


def test_the_messages_of_the_page_are_those_of_the_rules():
    nodes = Nodes(tuple(f"n{n}" for n in range(8)), tuple("AAAABBBB"), 8)
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) == 5
    for sizes, message in rows:
        with pytest.raises(LayoutError) as raised:
            place(nodes, Sizes(**eval(f"dict({sizes})")))
        pattern = ".*".join(re.escape(part) for part in re.split(r" ?… ?", message))
        assert re.fullmatch(pattern, str(raised.value)), raised.value
