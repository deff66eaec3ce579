"""Measurement of experts on nodes with one link each: bytes of a step, and its time."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from bench import netns
from bench.report import say
from bench.rows import Row, absent, row
from bench.training.moe_rank import Layer, rank_main
from bench.training.rank import Spec
from bench.training.session import Session
from bench.training.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.netns import Network

__all__ = ["moe", "moe_rows"]

LAYER: Final = Layer(
    width=512, hidden=32, experts=64, top_k=6, tokens=128, nodes=4, ranks_per_node=2
)
MEGABITS: Final = 300
"""Slow enough that two processors serve eight ranks and the links are the limit."""
OURS, PLAIN_OURS, PLAIN_GLOO = "haiscale+hfreduce", "all-to-all+hfreduce", "all-to-all+gloo"
VARIANTS: Final = (OURS, "haiscale+gloo", PLAIN_OURS, PLAIN_GLOO)
BYTES_GOAL, STEP_GOAL = 0.57, 0.6
BYTES_STEPS: Final = 4
TITLE: Final = "MoE, 4 nodes x 2"


def moe(rounds: int, *, quick: bool = False) -> tuple[list[Row], dict[str, Any]]:
    """One layer, forward and backward; variants take turns in the same ranks."""
    if why := netns.missing():
        return [absent(TITLE, why)], {}
    with Session(rank_main) as session:
        spec = Spec("moe", LAYER, ("hfreduce", "gloo"))
        group = session.start_on_wire(spec, (LAYER.nodes, 0), LAYER.ranks_per_node, MEGABITS)
        turns = Turns(group)
        variants = VARIANTS[:1] + VARIANTS[-1:] if quick else VARIANTS
        turns.run(variants, rounds)
        network = session.networks[0]
        sent = {name: _bytes(turns, network, name) for name in variants}
    say(f"{TITLE}: {LAYER.tokens} tokens of {LAYER.width} floats per rank, {MEGABITS} Mb/s")
    details = {"layer": asdict(LAYER), "megabits": MEGABITS, "seconds": turns.seconds,
               "bytes": sent}  # fmt: skip
    return moe_rows(TITLE, turns.seconds, sent), details


def _bytes(turns: Turns, network: Network, name: str) -> float:
    """Bytes of one step that leave a node, of the mean node, by its interface."""
    before = _left(network)
    turns.once(name, BYTES_STEPS)
    return (_left(network) - before) / LAYER.nodes / BYTES_STEPS


def _left(network: Network) -> int:
    total = 0
    for node in range(LAYER.nodes):
        text = netns.sh("ip", "-n", network.host(node), "-s", "-j", "link", "show", "eth0")
        total += int(json.loads(text)[0]["stats64"]["tx"]["bytes"])
    return total


def moe_rows(
    title: str, seconds: Mapping[str, Sequence[float]], sent: Mapping[str, float]
) -> list[Row]:
    """Rows of each variant, and ratios to one copy for each expert over Gloo. Pure."""
    rows = [row(f"{title}: {name}", "ms", [s * 1e3 for s in seconds[name]]) for name in seconds]
    rows += [row(f"{title}: {name}, off a node", "MiB", [sent[name] / 2**20]) for name in sent]
    ratios = [own / peer for own, peer in zip(seconds[OURS], seconds[PLAIN_GLOO], strict=True)]
    rows.append(
        row(f"{title}: bytes / copy per expert", "of", [sent[OURS] / sent[PLAIN_GLOO]], BYTES_GOAL)
    )
    rows.append(row(f"{title}: step / all-to-all, Gloo", "of", ratios, STEP_GOAL))
    return rows
