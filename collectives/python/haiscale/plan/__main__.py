"""``haiscale plan`` and ``python -m haiscale.plan``: layouts of a model on the nodes of a job."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from haiscale.model.hardware import FIRE_FLYER_2
from haiscale.placement import LayoutError, Nodes, Sizes
from haiscale.plan.models import MODELS, Model, ModelError
from haiscale.plan.search import Options, plan, plan_of
from haiscale.plan.text import AXES, document, table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_to", "main", "run_plan"]

FITS, NONE, USAGE = 0, 1, 2
GB: Final = 1e9
RANKS_MAX: Final = 10_000
"""Ranks of a job, as many as the paper's cluster has GPUs: a minute of work."""
EXAMPLES: Final = """
examples:
  haiscale plan llama-13b --topology topology.json
  haiscale plan llama-13b --nodes 8
  haiscale plan deepseekmoe-16b --nodes 40 --zones 2 --ep-nodes 4 --all
  haiscale plan llama-13b --nodes 8 --layout dp=8,pp=8     # one layout, and what it breaks
  haiscale plan my-model.json --nodes 4 --memory 80 --matmul 400 --card 50 -o json

MODEL is one of {models}, or a JSON or YAML file with
layers, width, heads, vocabulary, batch and context; optional: feed_forward, gated, tied, experts,
experts_per_token, expert_width, shared_experts, dense_layers, name.

exit status: 0 a layout fits, 1 no layout fits, 2 invalid arguments or files
"""


class _InvalidError(Exception):
    """Invalid arguments or files; the text is for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="haiscale.plan", description=_DESCRIPTION)
    _arguments(parser)
    return run_plan(parser.parse_args(arguments))


def add_to(commands: Any) -> None:
    """Adds the command to those of ``haiscale``."""
    parser = commands.add_parser(
        "plan", help="compare layouts of a model", description=_DESCRIPTION
    )
    _arguments(parser)
    parser.set_defaults(command=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    """Plans with parsed arguments; returns the exit status."""
    try:
        model, nodes, settings = _model(options.model), _nodes(options), _settings(options)
        if options.layout:
            result = plan_of(model, nodes, settings, _layout(options))
        else:
            result = plan(model, nodes, settings, options.best)
    except (_InvalidError, LayoutError) as error:
        sys.stderr.write(f"haiscale plan: {error}\n")
        return USAGE
    if options.output == "json":
        sys.stdout.write(json.dumps(document(result), indent=1) + "\n")
    else:
        width = max(80, shutil.get_terminal_size((100, 24)).columns)
        sys.stdout.write(table(result, every=options.all, width=min(width, 140)))
    return FITS if result.best else NONE


def _model(name: str) -> Model:
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(MODELS)
        raise _InvalidError(
            f"unknown model {name!r}: expected {known}, or a readable file ({error})"
        ) from None
    values = _parsed(path, text)
    if not isinstance(values, dict):
        raise _InvalidError(f"{name}: expected one object with the fields of a model")
    try:
        return Model.of(values, path.stem)
    except ModelError as error:
        raise _InvalidError(f"{name}: {error}") from None


def _parsed(path: Path, text: str) -> object:
    if path.suffix not in {".yaml", ".yml"}:
        try:
            return json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise _InvalidError(f"{path}: invalid JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise _InvalidError(f"{path}: PyYAML is not installed: install it, or use JSON") from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise _InvalidError(f"{path}: invalid YAML: {error}") from None


def _nodes(options: argparse.Namespace) -> Nodes:
    if options.topology:
        names, zones, ranks = _topology(options.topology)
    else:
        count, groups, ranks = options.nodes, options.zones, options.ranks_per_node
        if count % groups:
            raise _InvalidError(f"--zones {groups} does not divide --nodes {count}")
        names = tuple(f"node-{index}" for index in range(count))
        zones = tuple(f"zone-{index * groups // count}" for index in range(count))
    if len(names) * ranks > RANKS_MAX:
        raise _InvalidError(
            f"{len(names)} nodes of {ranks} ranks are {len(names) * ranks} ranks: the planner "
            f"compares layouts of at most {RANKS_MAX}"
        )
    return Nodes(names, zones, ranks, _nvlink(options.nvlink, ranks))


def _topology(path: str) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Names and zones of the nodes of a file, and the ranks of each."""
    from hfreduce import TopologyError, load_topology

    try:
        topology = load_topology(path)
    except (OSError, TopologyError) as error:
        raise _InvalidError(str(error)) from None
    places = topology.nodes
    names, zones = tuple(place.node for place in places), tuple(place.zone for place in places)
    return names, zones, topology.ranks_per_node


def _nvlink(name: str, ranks: int) -> tuple[tuple[int, ...], ...] | None:
    """The groups of local ranks that NVLink joins; None for consecutive pairs."""
    if name == "pairs":
        return None
    return (tuple(range(ranks)),) if name == "all" else ()


def _settings(options: argparse.Namespace) -> Options:
    hardware = FIRE_FLYER_2
    if options.memory:
        hardware = replace(hardware, memory_bytes=options.memory * GB)
    if options.matmul:
        hardware = replace(hardware, matmul_rate=options.matmul * 1e12)
    if options.card:
        hardware = replace(hardware, card_rate=options.card * GB)
    return Options(hardware, efficiency=options.efficiency, ep_nodes=options.ep_nodes)


def _layout(options: argparse.Namespace) -> Sizes:
    sizes = {}
    for part in options.layout.split(","):
        axis, _, text = part.partition("=")
        if axis not in AXES or axis in sizes or not re.fullmatch("[0-9]{1,6}", text):
            raise _InvalidError(
                f"invalid --layout {options.layout!r}: expected axes dp, shard, pp, tp, ep with "
                "sizes, for example dp=8,pp=8"
            )
        sizes[axis] = int(text)
    return Sizes(**sizes, ep_nodes=options.ep_nodes)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _share(text: str) -> float:
    value = _positive(text)
    if value > 1:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 < value <= RANKS_MAX:
        raise ValueError
    return value


_DESCRIPTION: Final = (
    "Compares the layouts of a model: memory of a rank, bytes on each link, predicted time of a "
    "step, and why other layouts lose."
)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES.format(models=", ".join(MODELS))
    parser.add_argument("model", metavar="MODEL", help="name of a model, or a JSON or YAML file")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--topology", metavar="FILE", help="nodes and zones, as in FLYER_TOPOLOGY")
    where.add_argument("--nodes", type=_count, metavar="N", help="number of nodes")
    parser.add_argument(
        "--zones", type=_count, default=1, metavar="N", help="with --nodes: number of zones (1)"
    )
    parser.add_argument(
        "--ranks-per-node", type=_count, default=8, metavar="N", help="with --nodes: ranks (8)"
    )
    parser.add_argument(
        "--nvlink", choices=("pairs", "none", "all"), default="pairs",
        help="accelerators of a node that NVLink joins (pairs)",
    )  # fmt: skip
    parser.add_argument(
        "--ep-nodes", type=_count, default=1, metavar="N",
        help="nodes over which the experts of a layer may be spread (1)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=_positive, metavar="GB", help="memory of an accelerator (40)"
    )
    parser.add_argument(
        "--matmul", type=_positive, metavar="TFLOPS", help="rate of matrix products (220)"
    )
    parser.add_argument(
        "--efficiency", type=_share, default=Options().efficiency, metavar="SHARE",
        help="share of that rate in a step (0.36)",
    )  # fmt: skip
    parser.add_argument(
        "--card", type=_positive, metavar="GB/S", help="rate of a node's card, each way (25)"
    )
    parser.add_argument("--layout", metavar="AXES", help="one layout only, for example dp=8,pp=8")
    parser.add_argument(
        "--best", type=_count, default=5, metavar="N", help="layouts to show in full (5)"
    )
    parser.add_argument("--all", action="store_true", help="list every layout")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


if __name__ == "__main__":
    sys.exit(main())
