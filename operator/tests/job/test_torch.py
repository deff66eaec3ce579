"""An unmodified torchrun script runs over two pods with one import of torch."""

import asyncio
import socket

import pytest
from flyer.job.fork_server import ForkServer, PodExit

pytest.importorskip("torch")

SCRIPT = """
    import os, time
    born = time.monotonic()
    import torch
    import torch.distributed as dist
    import_seconds = time.monotonic() - born
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    print(dist.get_world_size(), os.environ["LOCAL_RANK"], total.item(), import_seconds < 0.5)
    dist.destroy_process_group()
"""


@pytest.mark.torch
async def test_a_torchrun_script_of_four_ranks_starts_with_one_import(make_pod, watch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork_server = await ForkServer.start(["torch", "torch.distributed"])
    try:
        assert fork_server.preload_problems == []
        specs = [
            make_pod(SCRIPT, node_rank=n, nodes=2, ranks_per_node=2, master_port=port)
            for n in range(2)
        ]
        pods = await asyncio.gather(*(fork_server.spawn(spec) for spec in specs))
        async with asyncio.timeout(60):
            assert [await pod.wait() for pod in pods] == [PodExit(0)] * 2
        for rank in range(4):
            assert watch.log_of(specs[rank // 2], rank) == f"4 {rank % 2} 6.0 True\n"
    finally:
        await fork_server.close()
