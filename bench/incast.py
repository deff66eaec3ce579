"""Incast: many services answer few receivers, each behind a link with a short queue.

Services and receivers are processes in network namespaces; a token bucket filter limits the link of
each receiver. Half of the receivers have a slow link, except in the first scenario. Every scenario
runs with the client's window and the services' budget of reply memory, and without both. It
reports, for the receivers with fast links, the received bytes relative to what the link carries and
Jain's fairness index over the services and over the receivers, and the peak memory of a service.
Needs root, `ip` and `tc`; everything it creates has unique names and is removed.

    python -m bench.incast [--megabits 200] [--slow 10] [--seconds 12] [--rounds 3] [--output FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.netns import Namespaces, sh
from bench.report import OUTPUT, ROOT, machine, peak_bytes, say, write_json

if TYPE_CHECKING:
    from collections.abc import Iterable

PORT = 20_000
REQUEST_BYTES = 512 << 10
WINDOW_BYTES = 32 << 20
"""The client's default (`ClientConfig.bytes_in_flight_max`)."""
MEMORY_BYTES = 8 << 20
"""Memory of a service for replies."""
UNLIMITED_BYTES = 1 << 30
QUEUE_BYTES = 128 << 10
BURST_BYTES = 16 << 10
REPLY_SECONDS = 60
"""Time limit for the start of a process, and for its report after a trial."""
HEADERS = 1448 / 1514
"""Part of an Ethernet frame that is payload of TCP; the filter counts whole frames."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Numbers of processes."""

    services: int
    fast: int
    slow: int = 0

    def __str__(self) -> str:
        return f"{self.services} services, {self.fast} fast and {self.slow} slow receivers"


SCENARIOS = (Scenario(64, 1), Scenario(64, 2, 2), Scenario(4, 4, 4))
"""In the last one, the windows of the slow receivers exceed the memory of the services."""


@dataclass
class Network(Namespaces):
    """A namespace for the services, and one behind a limited link for each receiver."""

    megabits: list[float]
    tag: str = field(default_factory=lambda: f"inc{os.getpid() % 100_000}")

    def receiver(self, number: int) -> str:
        """The namespace of a receiver."""
        return f"{self.tag}r{number}"

    @property
    def services(self) -> str:
        """The namespace of the services."""
        return f"{self.tag}s"

    def addresses(self, number: int, services: int) -> list[str]:
        """The services, as a receiver reaches them."""
        return [f"10.78.{number}.1:{PORT + service}" for service in range(services)]

    def _build(self) -> None:
        self._namespace(self.services)
        for number, megabits in enumerate(self.megabits):
            name, port = self.receiver(number), f"r{number}"
            self._namespace(name)
            sh(
                *("ip", "link", "add", port, "netns", self.services, "type", "veth"),
                *("peer", "name", "eth0", "netns", name),
            )
            for space, device, host in ((self.services, port, 1), (name, "eth0", 2)):
                sh("ip", "-n", space, "addr", "add", f"10.78.{number}.{host}/24", "dev", device)
                sh("ip", "-n", space, "link", "set", device, "up")
                # Without segmentation offload the queue holds packets, as a switch does.
                sh("ip", "-n", space, "link", "set", device, "gso_max_segs", "1")
            sh(
                *("tc", "-n", self.services, "qdisc", "add", "dev", port, "root", "tbf"),
                *("rate", f"{megabits}mbit", "burst", str(BURST_BYTES)),
                *("limit", str(QUEUE_BYTES)),
            )

    def dropped(self, number: int) -> int:
        """Packets that did not fit into a receiver's queue."""
        device = ("dev", f"r{number}")
        statistics = json.loads(sh("tc", "-n", self.services, "-s", "-j", "qdisc", "show", *device))
        return int(statistics[0]["drops"])


@dataclass
class Result:
    """Figures of one trial; per receiver with a fast link where several values are listed."""

    scenario: Scenario
    limited: bool
    goodput: list[float]
    jain_services: list[float]
    jain_receivers: float
    memory_bytes_max: int
    dropped: int
    errors: int


def jain(values: Iterable[float]) -> float:
    """Jain's fairness index: 1 if all values are equal, 1/n if one has everything."""
    values = list(values)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def read_line(process: subprocess.Popen[str], name: str, seconds: float) -> str:
    """A line of a process's output; without one in time the process is killed."""
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if not line:
        raise SystemExit(
            f"incast {name}: no reply within {seconds:g} s; its error, if any, is above"
        )
    return line


def trial(
    binary: Path, scenario: Scenario, megabits: list[float], seconds: float, *, limited: bool
) -> Result:
    """All receivers read for `seconds`, of which the first quarter does not count."""
    memory_bytes = MEMORY_BYTES if limited else UNLIMITED_BYTES
    window_bytes = WINDOW_BYTES if limited else UNLIMITED_BYTES
    with Network(megabits) as network, contextlib.ExitStack() as running:

        def process(namespace: str, *args: str) -> subprocess.Popen[str]:
            started = subprocess.Popen(
                ["ip", "netns", "exec", namespace, str(binary), *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            running.callback(started.wait, timeout=30)
            running.callback(started.kill)
            if read_line(started, args[0], REPLY_SECONDS) != "ready\n":
                raise SystemExit(f"incast {args[0]} did not start; its error, if any, is above")
            return started

        services = [
            process(network.services, "serve", str(PORT + number), str(memory_bytes))
            for number in range(scenario.services)
        ]
        options = (str(seconds), str(REQUEST_BYTES), str(window_bytes))
        receivers = []
        for number in range(len(megabits)):
            addresses = network.addresses(number, scenario.services)
            receivers.append(process(network.receiver(number), "read", *options, *addresses))
        for receiver in receivers:
            assert receiver.stdin is not None
            receiver.stdin.write("start\n")
            receiver.stdin.flush()
        reports: list[dict[str, Any]] = [
            json.loads(read_line(receiver, "read", seconds + REPLY_SECONDS))
            for receiver in receivers
        ]
        totals = [sum(report["bytes"]) / report["seconds"] for report in reports]
        limits = [rate * 1e6 / 8 * HEADERS for rate in megabits]
        return Result(
            scenario=scenario,
            limited=limited,
            goodput=[totals[number] / limits[number] for number in range(scenario.fast)],
            jain_services=[jain(reports[number]["bytes"]) for number in range(scenario.fast)],
            jain_receivers=jain(totals[: scenario.fast]),
            memory_bytes_max=max(peak_bytes(service.pid) for service in services),
            dropped=sum(network.dropped(number) for number in range(scenario.fast)),
            errors=sum(report["errors"] for report in reports),
        )


def described(result: Result) -> str:
    """One line."""
    return (
        f"{result.scenario}, {'limited' if result.limited else 'not limited'}: "
        f"goodput {min(result.goodput):.3f}, Jain of services {min(result.jain_services):.3f}, "
        f"of receivers {result.jain_receivers:.3f}, {result.memory_bytes_max / 1e6:.0f} MB, "
        f"{result.dropped} packets dropped, {result.errors} errors"
    )


def main() -> None:
    """Run all trials and write their results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabits", type=float, default=200, help="rate of fast links")
    parser.add_argument("--slow", type=float, default=10, help="rate of slow links")
    parser.add_argument("--seconds", type=float, default=12, help="length of a trial")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/examples/incast")
    parser.add_argument("--output", type=Path, default=OUTPUT / "incast.json")
    args = parser.parse_args()
    results: list[Result] = []
    for _ in range(args.rounds):
        for scenario in SCENARIOS:
            megabits = [args.megabits] * scenario.fast + [args.slow] * scenario.slow
            for limited in (True, False):
                result = trial(args.binary, scenario, megabits, args.seconds, limited=limited)
                say(described(result))
                results.append(result)
    for scenario in SCENARIOS:
        for limited in (True, False):
            same = [it for it in results if (it.scenario, it.limited) == (scenario, limited)]
            goodput = statistics.median(min(it.goodput) for it in same)
            print(f"{scenario}, {'limited' if limited else 'not limited'}: goodput {goodput:.3f}")
    write_json(args.output, {"machine": machine(), "results": [asdict(it) for it in results]})


if __name__ == "__main__":
    main()
