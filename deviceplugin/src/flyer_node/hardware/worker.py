"""The worker process: answers questions about the hardware, one JSON object a line.

It may hang in a system call for ever; then its parent kills it. Three threads, so that a hung GPU
driver does not keep sysfs from being read: `driver`, `sysfs`, and one that waits for events.
It ends when its standard input ends, or when its parent dies.
"""

from __future__ import annotations

import ctypes
import json
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyer_node.inventory.assemble import read_sysfs
from flyer_node.inventory.hca import read_ports
from flyer_node.inventory.tree import SysfsTree
from flyer_node.serial import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer_node.hardware.driver import GpuDriver

__all__ = ["BEAT_SECONDS", "CHANNEL_OF", "main"]

BEAT_SECONDS = 0.5
"""The thread that waits for events says so often that it lives."""
CHANNEL_OF = {"facts": "driver", "status": "driver", "listen": "driver"} | dict.fromkeys(
    ("sysfs", "ports"), "sysfs"
)
"""Which thread answers which question."""

_PR_SET_PDEATHSIG = 1


class Worker:
    """Questions in, answers and events out."""

    def __init__(self, driver: GpuDriver, write: Callable[[dict[str, Any]], None]) -> None:
        self._driver = driver
        self._write = write
        self._queues: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._listening = False
        self._refused: set[str] = set()

    def take(self, question: dict[str, Any]) -> None:
        """Hands a question to its thread."""
        channel = CHANNEL_OF[question["ask"]]
        if channel not in self._queues:
            self._queues[channel] = queue.Queue()
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()
        self._queues[channel].put(question)

    def _serve(self, channel: str) -> None:
        while True:
            question = self._queues[channel].get()
            try:
                answer = {"id": question["id"], "answer": to_json(self._answer(question))}
            except Exception as error:  # noqa: BLE001 - any refusal is an answer
                answer = {"id": question["id"], "error": f"{type(error).__name__}: {error}"}
            self._write(answer)

    def _answer(self, question: dict[str, Any]) -> Any:
        match question["ask"]:
            case "facts":
                return self._driver.facts()
            case "status":
                return self._driver.status(question["gpus"])
            case "sysfs":
                return read_sysfs(Path(question["root"]))
            case "ports":
                return read_ports(SysfsTree(Path(question["root"]), self._refused))
            case "listen":
                if not self._listening:
                    self._listening = True
                    threading.Thread(
                        target=self._listen, args=(question["gpus"],), daemon=True
                    ).start()
                return None

    def _listen(self, gpus: Sequence[str]) -> None:
        try:
            for event in self._driver.events(gpus, BEAT_SECONDS):
                self._write({"beat": True} if event is None else {"event": to_json(event)})
        except Exception as error:  # noqa: BLE001 - told, and the parent starts anew
            self._write({"deaf": f"{type(error).__name__}: {error}"})
        else:
            self._write({"silent": True})


def main() -> None:
    """Serves standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from flyer_node.hardware.nvml import NvmlDriver

    lock = threading.Lock()

    def write(message: dict[str, Any]) -> None:
        line = json.dumps(message, separators=(",", ":")) + "\n"
        with lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    worker = Worker(NvmlDriver(), write)
    for line in sys.stdin:
        worker.take(json.loads(line))


if __name__ == "__main__":
    main()
