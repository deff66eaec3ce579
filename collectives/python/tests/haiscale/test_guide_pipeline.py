"""The script and the messages of docs/guides/train-a-pipeline.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from haiscale.pipeline.errors import PartitionError
from haiscale.pipeline.layers import partition
from haiscale.pipeline.schedules import build

PAGE = Path(__file__).parents[4] / "docs/guides/train-a-pipeline.md"


@pytest.mark.torch
@pytest.mark.alone
def test_the_script_runs_under_torchrun(tmp_path):
    script = re.search(r"file pipeline.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "pipeline.py").write_text(script[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", "pipeline.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    # Ranks share the pipe: a newline may come after another rank's text.
    lines = re.findall(r"rank (\d): loss (\d+\.\d+), (blocks\.\d\.0\.bias)", result.stdout)
    assert sorted(rank for rank, _, _ in lines) == ["0", "1", "2", "3"]
    assert {name for _, _, name in lines} == {"blocks.0.0.bias", "blocks.3.0.bias"}
    # It learns to repeat the token: the loss of a guess is log(64), 4.16.
    assert all(float(loss) < 2.5 for _, loss, _ in lines), lines


def test_the_command_draws_a_picture(tmp_path):
    command = re.search(
        r"^python (-m haiscale.pipeline.picture .*)$", PAGE.read_text(), re.MULTILINE
    )
    subprocess.run([sys.executable, *command[1].split()], cwd=tmp_path, timeout=60, check=True)
    assert "Eager1F1B, 4 ranks" in (tmp_path / "eager.svg").read_text()


def test_the_messages_of_the_page_are_those_of_the_errors():
    page = PAGE.read_text()
    for error, call in (
        (ValueError, lambda: build("1F1B", ranks=4, microbatches=3)),
        (PartitionError, lambda: partition(list("abcdef"), 8)),
    ):
        with pytest.raises(error) as raised:
            call()
        shown = re.search(rf"`{type(raised.value).__name__}: (.*?) ?…`", page)
        assert str(raised.value).startswith(shown[1])
