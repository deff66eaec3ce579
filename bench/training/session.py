"""Ranks of the training benchmark: on one host's network, or on nodes with one link each."""

from __future__ import annotations

import json
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from hfreduce.testing import Layout, run

from bench.collectives.harness import Harness
from bench.collectives.netns import TUNED_CHUNK_BYTES
from bench.netns import Network
from bench.training import rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.collectives.harness import RankGroup
    from bench.training.rank import Spec

__all__ = ["Session"]

SESSION_SECONDS = 3600.0
LIVENESS_SECONDS = "60"
"""Eight ranks on two processors delay each other's heartbeats."""


class Session:
    """Rank groups that take turns; the end of the context ends their processes.

    `main` is what each rank runs: a function at the top level of its module.
    """

    def __init__(self, main: Callable[..., None] = rank.rank_main) -> None:
        self._main = main
        self._stack = ExitStack()
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []
        self.networks: list[Network] = []

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._harness = self._stack.enter_context(Harness(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        # The ranks end when their connections close; namespaces are removed after that.
        self._harness.__exit__()
        for thread in self._threads:
            thread.join(timeout=60)
        self._stack.close()

    def start(self, spec: Spec, layout: Layout, *, transport: str = "auto") -> RankGroup:
        """Starts the ranks of a layout on this host's network."""
        return self._start(spec, layout, {"HFREDUCE_TRANSPORT": transport}, [])

    def start_on_wire(
        self, spec: Spec, zones: tuple[int, int], ranks_per_node: int, megabits: int | None
    ) -> RankGroup:
        """Starts the ranks on nodes in two zones, each with one link; None: without a limit."""
        network = self._stack.enter_context(Network(zones, megabits))
        self.networks.append(network)
        count = sum(zones)
        layout = Layout(
            tuple((f"n{node}", "AB"[network.zone_of(node)]) for node in range(count)),
            ranks_per_node,
        )
        spec = replace(
            spec,
            namespaces=tuple(network.host(node) for node in range(count)),
            ranks_per_node=ranks_per_node,
        )
        environment = {
            "HFREDUCE_TRANSPORT": "tcp",  # these nodes could share memory
            "HFREDUCE_CHUNK_BYTES": str(TUNED_CHUNK_BYTES),  # as documented for slow links
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        return self._start(spec, layout, environment, [network.address(n) for n in range(count)])

    def _start(
        self, spec: Spec, layout: Layout, environment: dict[str, str], addresses: list[str]
    ) -> RankGroup:
        document = layout.document()
        nodes = document["nodes"]
        assert isinstance(nodes, list)
        for node, address in zip(nodes, addresses, strict=False):
            node["address"] = address
        topology = self._folder / f"{spec.name}.json"
        topology.write_text(json.dumps(document), encoding="utf-8")
        environment |= {
            "FLYER_TOPOLOGY": str(topology),
            "HFREDUCE_LIVENESS_SECONDS": LIVENESS_SECONDS,
        }

        def body() -> None:
            outcomes = run(
                self._main, layout, str(self._harness.path),
                str(self._folder / f"{spec.name}.store"), spec,
                backend=None, deadline_seconds=SESSION_SECONDS, environment=environment,
            )  # fmt: skip
            self._failures += [
                f"rank {outcome.rank}: {outcome.failure}" for outcome in outcomes if outcome.failure
            ]

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self._threads.append(thread)

        def ended() -> str | None:
            return None if thread.is_alive() else "; ".join(self._failures) or "has ended"

        return self._harness.gather(spec.name, layout.world_size, ended)
