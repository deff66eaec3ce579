"""torch finds the backend by its name: a script that has never heard of hfreduce names it."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[2], init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
ones = torch.ones(3)
dist.all_reduce(ones)
print(dist.get_backend(), ones.tolist())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("word", ["hfreduce", "cpu:hfreduce"])
def test_one_changed_word_is_enough(tmp_path, word):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "store", word],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"{word} [1.0, 1.0, 1.0]\n"), done.stderr
