"""The script and the messages of docs/guides/run-a-haiscale-script.md."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from haiscale.fsdp import FullyShardedDataParallel
from haiscale.pipeline.microbatches import MicrobatchError, divide
from haiscale.unsupported import UnsupportedArgumentError
from torch import nn

PAGE = Path(__file__).parents[4] / "docs/guides/run-a-haiscale-script.md"


@pytest.mark.torch
@pytest.mark.alone
def test_the_script_trains_and_saves_each_stage(tmp_path):
    """`python hai_gpt.py`."""
    script = re.search(r"file hai_gpt.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "hai_gpt.py").write_text(script[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = subprocess.run(
        [sys.executable, "hai_gpt.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280,
        check=False, env=os.environ | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    lines = re.findall(r"replica (\d): loss (\d+\.\d+), right (\d\.\d+)", result.stdout)
    assert sorted(replica for replica, _, _ in lines) == ["0", "1"]
    # It learns to repeat the token: the loss of a guess is log(64), 4.16.
    assert all(float(loss) < 2.5 and float(right) > 0.5 for _, loss, right in lines), lines
    names = [list(torch.load(tmp_path / f"latest.RANK{stage:03d}.pt")) for stage in range(2)]
    assert names[0][0] == "0.weight"
    assert names[1][-1] == "5.bias"
    assert not set(names[0]) & set(names[1])


def test_the_messages_of_the_page_are_those_of_the_errors():
    page = PAGE.read_text()
    with pytest.raises(UnsupportedArgumentError) as refused:
        FullyShardedDataParallel(nn.Linear(1, 1), limit_all_gathers=True)
    problem, _, _reason = str(refused.value).rpartition(": ")
    assert f"`UnsupportedArgumentError: {problem}: …`" in page
    with pytest.raises(MicrobatchError) as undivided:
        divide(torch.zeros(9), 4, "inputs[0]")
    problem, _, _remedy = str(undivided.value).rpartition(": ")
    assert f"`PipelineError: rank 0, stage 0: {problem}: …`" in page
