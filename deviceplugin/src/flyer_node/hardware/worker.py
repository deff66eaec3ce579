"""The worker process: answers questions about the hardware, one JSON object a line.

If it hangs in a system call, its parent kills it. It has three threads, so that sysfs is read also
while the GPU driver hangs: `driver`, `sysfs`, and one that waits for events. It ends at the end of
its standard input, or when its parent dies.
"""

from __future__ import annotations

import ctypes
import json
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyer_node.heap import limit_arenas
from flyer_node.inventory.assemble import read_sysfs
from flyer_node.inventory.hca import read_ports
from flyer_node.inventory.tree import SysfsTree
from flyer_node.json_codec import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer_node.hardware.driver import GpuDriver

__all__ = ["BEAT_SECONDS", "CHANNEL_OF", "PULSE_SECONDS", "main"]

BEAT_SECONDS = 0.5
"""Interval of heartbeats of the thread that waits for events."""
PULSE_SECONDS = 0.25
"""Interval of heartbeats of the worker during a call: they distinguish a hung driver from a busy
node.
"""
CHANNEL_OF = dict.fromkeys(("facts", "status", "probe", "listen"), "driver") | dict.fromkeys(
    ("sysfs", "ports"), "sysfs"
)
"""Thread that answers each query."""

_PR_SET_PDEATHSIG = 1


class Worker:
    """Questions in, answers and events out."""

    def __init__(self, driver: GpuDriver, write: Callable[[dict[str, Any]], None]) -> None:
        self._driver = driver
        self._write = write
        self._queues: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._listening = False
        self._refused: set[str] = set()
        self._open = 0
        self._asked = threading.Condition()
        threading.Thread(target=self._pulse, daemon=True).start()

    def take(self, question: dict[str, Any]) -> None:
        """Hands a question to its thread."""
        channel = CHANNEL_OF[question["ask"]]
        if channel not in self._queues:
            self._queues[channel] = queue.Queue()
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()
        with self._asked:
            self._open += 1
            self._asked.notify()
        self._queues[channel].put(question)

    def _pulse(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._open > 0)
            time.sleep(PULSE_SECONDS)
            if self._open > 0:
                self._write({"pulse": True})

    def _serve(self, channel: str) -> None:
        while True:
            question = self._queues[channel].get()
            try:
                answer = {"id": question["id"], "answer": to_json(self._answer(question))}
            except Exception as error:  # noqa: BLE001 - any refusal is an answer
                answer = {"id": question["id"], "error": f"{type(error).__name__}: {error}"}
            with self._asked:
                self._open -= 1
            self._write(answer)

    def _answer(self, question: dict[str, Any]) -> Any:
        match question["ask"]:
            case "facts":
                return self._driver.facts()
            case "status":
                return self._driver.status(question["gpus"])
            case "probe":
                return self._driver.probe(question["gpus"])
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
        except Exception as error:  # noqa: BLE001 - reported, and the parent restarts the worker
            self._write({"deaf": f"{type(error).__name__}: {error}"})
        else:
            self._write({"silent": True})


def main() -> None:
    """Serves standard input until it ends."""
    limit_arenas()
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
