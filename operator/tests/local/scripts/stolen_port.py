"""Rank 1 of the first attempt listens on the port of rank 0, like another program."""

import datetime as dt
import os
import socket
import time

import torch.distributed as dist

PATIENCE = dt.timedelta(seconds=30)
place = ("127.0.0.1", int(os.environ["MASTER_PORT"]))


def wait_until_taken() -> None:
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < deadline:
        try:
            socket.create_connection(place).close()
        except ConnectionRefusedError:
            time.sleep(0.01)
        else:
            return
    raise SystemExit("the port is free")


print(f"rank {os.environ['RANK']} attempt {os.environ['FLYER_ATTEMPT']} port {place[1]}")
if os.environ["FLYER_ATTEMPT"] == "1":
    if os.environ["RANK"] == "1":
        with socket.create_server(place):
            time.sleep(2 * PATIENCE.total_seconds())
    wait_until_taken()
dist.init_process_group("gloo", timeout=PATIENCE)
dist.barrier()  # a rank that ends earlier would break off the other one's connection
dist.destroy_process_group()
