"""`flyer-node`: runs the node agent, or shows the inventory and health checks of this node."""

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
    """Command line entry point; exit status 0, 1 for a failure or 2 for an invalid setting."""
    parser = argparse.ArgumentParser(prog="flyer-node", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "run the agent: device plugin and health monitoring"),
        ("inventory", "list GPUs and HCAs of this node"),
        ("topo", "show the PCIe tree; `-o xml` prints NCCL's topology file"),
        ("doctor", "check the node and suggest remedies"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add_flags(command, os.environ)
        if name != "run":
            formats = ["text", "json", "xml"] if name == "topo" else ["text", "json"]
            command.add_argument("-o", "--output", choices=formats, default="text")
    values = parser.parse_args(arguments)
    try:
        settings = read_settings(values, os.environ)
        _logging(settings.log_level)
        if values.command == "run":
            return _run(settings)
        return _show(values.command, settings, values.output)
    except NodeAgentError as error:
        sys.stderr.write(f"flyer-node: {error}\n")
        return EXIT_FAILED if isinstance(error, HardwareError) else EXIT_USAGE


def _run(settings: Settings) -> int:
    from flyer_node.heap import limit_arenas

    limit_arenas()
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


def _show(command: str, settings: Settings, output: str) -> int:
    from flyer_node.cli import doctor
    from flyer_node.cli import output as text_output

    inventory, problems = asyncio.run(_observe(settings))
    if command == "doctor":
        checks = doctor.run_checks(inventory, settings, problems)
        _print([vars(check) for check in checks] if output == "json" else doctor.table(checks))
        return EXIT_FAILED if any(check.level == "error" for check in checks) else 0
    if output == "xml":
        from flyer_node.inventory.nccl import nccl_topology

        _print(nccl_topology(inventory).rstrip())
    elif output == "json":
        from flyer_node.json_codec import to_json

        _print(to_json(inventory))
    else:
        _print(text_output.tree(inventory) if command == "topo" else text_output.listing(inventory))
    for problem in problems:
        sys.stderr.write(f"flyer-node: {problem}\n")
    return EXIT_FAILED if problems else 0


async def _observe(settings: Settings) -> tuple[Inventory, list[str]]:
    """Reads one inventory, with the agent's deadlines."""
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
    """Logs JSON lines to standard error."""
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
