"""torch finds the backend by its name, in a script that does not import hfreduce."""

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


@pytest.mark.parametrize("backend", ["hfreduce", "cpu:hfreduce"])
def test_changing_the_backend_name_is_enough(tmp_path, backend):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "store", backend],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, f"{backend} [1.0, 1.0, 1.0]\n"), result.stderr
