"""`flyer-node`: run the agent, or ask what it would see."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from flyer_node.errors import HardwareError, NodeAgentError
from flyer_node.settings import add_flags, read_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flyer_node.inventory import Inventory
    from flyer_node.settings import Settings

__all__ = ["main"]

EXIT_FAILED, EXIT_USAGE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 0, 1 for a failure, 2 for a value that is not usable."""
    parser = argparse.ArgumentParser(prog="flyer-node", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, text in (
        ("run", "serve the kubelet and watch the hardware"),
        ("inventory", "what the node has"),
        ("topo", "the PCIe tree with GPUs, pairs and HCAs; `-o xml` is NCCL's file"),
        ("doctor", "what keeps the node from working, with remedies"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        add_flags(verb, os.environ)
        if name != "run":
            formats = ["text", "json", "xml"] if name == "topo" else ["text", "json"]
            verb.add_argument("-o", "--output", choices=formats, default="text")
    values = parser.parse_args(arguments)
    try:
        settings = read_settings(values, os.environ)
        _logging(settings.log_level)
        if values.verb == "run":
            return _run(settings)
        return _show(values.verb, settings, values.output)
    except NodeAgentError as error:
        sys.stderr.write(f"flyer-node: {error}\n")
        return EXIT_FAILED if isinstance(error, HardwareError) else EXIT_USAGE


def _run(settings: Settings) -> int:
    from flyer_node.memory import few_arenas

    few_arenas()
    from flyer_node.agent import Agent

    async def serve() -> None:
        task = asyncio.ensure_future(Agent(settings).run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return

    asyncio.run(serve())
    return 0


def _show(verb: str, settings: Settings, output: str) -> int:
    from flyer_node import views

    inventory, problems = asyncio.run(_observe(settings))
    if verb == "doctor":
        remedies = views.doctor(inventory, settings, problems)
        _print([vars(one) for one in remedies] if output == "json" else views.table(remedies))
        return EXIT_FAILED if any(one.level == "error" for one in remedies) else 0
    if output == "xml":
        from flyer_node.inventory.nccl import nccl_topology

        _print(nccl_topology(inventory).rstrip())
    elif output == "json":
        from flyer_node.serial import to_json

        _print(to_json(inventory))
    else:
        _print(views.tree(inventory) if verb == "topo" else views.listing(inventory))
    for problem in problems:
        sys.stderr.write(f"flyer-node: {problem}\n")
    return EXIT_FAILED if problems else 0


async def _observe(settings: Settings) -> tuple[Inventory, list[str]]:
    """One inventory, with the same deadlines as the agent's."""
    from flyer_node.hardware.client import Hardware
    from flyer_node.inventory.assemble import DriverFacts, SysfsFacts, assemble

    hardware = Hardware(settings.sysfs_root)
    problems: list[str] = []
    sysfs, driver = SysfsFacts(), DriverFacts()
    try:
        try:
            sysfs = await hardware.sysfs()
        except HardwareError as error:
            problems.append(f"sysfs: {error}")
        try:
            driver = await hardware.facts()
        except HardwareError as error:
            problems.append(f"driver: {error}")
    finally:
        await hardware.close()
    return assemble(settings.name, sysfs, driver), problems


def _print(value: Any) -> None:
    sys.stdout.write((value if isinstance(value, str) else json.dumps(value, indent=2)) + "\n")


def _logging(level: str) -> None:
    """JSON lines on standard error."""
    import structlog

    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
