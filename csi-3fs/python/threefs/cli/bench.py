"""`threefs bench`: durable batch writes and batch reads, and their ratio to the raw disk."""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING

from threefs.cli.output import Output, describe_bytes, print_json, stdout_console
from threefs.client import Client, connect
from threefs.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run_bench"]

PIECE_BYTES = 4 << 20


def run_bench(
    cluster: Path | None,
    size: int,
    batch: int,
    raw: Path | None,
    output: Output,
    timeout_seconds: float,
) -> None:
    """Write and read one file in batches; with `raw`, measure the disk under it as well."""
    if size < 1 or batch < 1:
        raise InvalidArgument(f"--size is {size} and --batch is {batch}; both must be above 0")
    figures: dict[str, float] = {"bytes": size}
    with connect(cluster, timeout_seconds=timeout_seconds) as client:
        path = f"/.bench-{uuid.uuid4().hex}"
        try:
            figures["write_bytes_per_second"] = _write(client, path, size, batch)
            figures["read_bytes_per_second"] = _read(client, path, size, batch)
            near = client.read_bytes()
            figures |= {f"read_bytes_{distance}": count for distance, count in near.items()}
        finally:
            if client.exists(path):
                client.remove(path)
    if raw is not None:
        figures["raw_write_bytes_per_second"] = _raw_write(raw, size)
        share = figures["write_bytes_per_second"] / figures["raw_write_bytes_per_second"]
        figures["write_share_of_raw"] = share
    if output is Output.JSON:
        print_json(figures)
        return
    console = stdout_console()
    console.print(f"size   {describe_bytes(size)} in batches of {describe_bytes(batch)}")
    console.print(f"write  {_rate(figures['write_bytes_per_second'])}, durable on all replicas")
    console.print(f"read   {_rate(figures['read_bytes_per_second'])}")
    if raw is not None:
        console.print(
            f"disk   {_rate(figures['raw_write_bytes_per_second'])} written once with fdatasync; "
            f"the write is {figures['write_share_of_raw']:.0%} of it"
        )


def _write(client: Client, path: str, size: int, batch: int) -> float:
    data = memoryview(os.urandom(min(batch, size)))
    started = time.monotonic()
    for start in range(0, size, batch):
        client.batch_write([(path, start, data[: min(batch, size - start)])])
    return size / (time.monotonic() - started)


def _read(client: Client, path: str, size: int, batch: int) -> float:
    buffer = memoryview(bytearray(min(batch, size)))
    started = time.monotonic()
    for start in range(0, size, batch):
        client.batch_read_into([(path, start, buffer[: min(batch, size - start)])])
    return size / (time.monotonic() - started)


def _raw_write(folder: Path, size: int) -> float:
    path = folder / f".bench-{uuid.uuid4().hex}"
    data = os.urandom(PIECE_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        started = time.monotonic()
        for start in range(0, size, PIECE_BYTES):
            os.write(descriptor, data[: min(PIECE_BYTES, size - start)])
        os.fdatasync(descriptor)
        return size / (time.monotonic() - started)
    finally:
        os.close(descriptor)
        path.unlink()


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:,.0f} MB/s"
