"""Entry point of `flyer-sidecar`: serves, or probes a serving sidecar (`probe`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from flyer.sidecar.settings import SidecarSettings

__all__ = ["main"]

PROBE_SECONDS: Final = 10.0
PROBE_POLL_SECONDS: Final = 0.02
EXIT_BAD_SETTING: Final = 2
USAGE: Final = "usage: flyer-sidecar [probe]\n"


def main() -> int:
    """`flyer-sidecar [probe]`."""
    arguments = sys.argv[1:]
    if arguments == ["probe"]:
        return _probe(Path(os.environ.get("FLYER_RUN_FOLDER") or "/run/flyer"))
    if arguments == ["--help"]:
        sys.stdout.write(USAGE)
        return 0
    if arguments:
        sys.stderr.write(USAGE)
        return EXIT_BAD_SETTING
    from flyer.sidecar.settings import SettingError, SidecarSettings

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        settings = SidecarSettings.read(os.environ)
    except SettingError as error:
        sys.stderr.write(f"flyer-sidecar: {error}\n")
        return EXIT_BAD_SETTING
    asyncio.run(_serve(settings))
    return 0


class _JsonLines(logging.Formatter):
    """Format of the log lines, as in all components."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": "sidecar",
            "msg": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


async def _serve(settings: SidecarSettings) -> None:
    from flyer.sidecar.sidecar import Sidecar

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    sidecar = Sidecar(settings)
    running = asyncio.create_task(sidecar.run())
    waiting = asyncio.create_task(stopped.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        waiting.cancel()
        running.result()  # raises the error: the kubelet restarts the container
        return
    await sidecar.finish()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _probe(folder: Path) -> int:
    """Wait until the launcher's socket is served. Returns the exit status, 0 if it is."""
    path, deadline = folder / "launcher.sock", time.monotonic() + PROBE_SECONDS
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except OSError as error:
                if time.monotonic() > deadline:
                    sys.stderr.write(f"flyer-sidecar: {path}: {error}\n")
                    return 1
            else:
                return 0
        time.sleep(PROBE_POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
