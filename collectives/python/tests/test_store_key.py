"""With a key file torch's store contains nothing that lets another process join the group."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[2])
dist.init_process_group("hfreduce", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
ones = torch.ones(3)
dist.all_reduce(ones)
print(ones.tolist())
"""
KEY = "5c" * 32


@pytest.mark.parametrize("with_file", [True, False])
def test_the_store_has_a_key_only_without_a_key_file(tmp_path, with_file):
    """Any host can read torch's store on the network; here it is a file, which the test reads."""
    store, key = tmp_path / "store", tmp_path / "key"
    key.write_text(KEY)
    environment = {name: value for name, value in os.environ.items() if name != "HFREDUCE_KEY_FILE"}
    if with_file:
        environment["HFREDUCE_KEY_FILE"] = str(key)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, store, str(rank)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, errors = rank.communicate(timeout=100)
        assert (rank.returncode, out) == (0, "[2.0, 2.0, 2.0]\n"), errors
    content = store.read_bytes()
    assert b"hfreduce/endpoint" in content
    assert (b"hfreduce/key" in content) == (not with_file)
    assert KEY.encode() not in content
    assert bytes.fromhex(KEY) not in content
