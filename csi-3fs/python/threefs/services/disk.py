"""Disk identity: prevents an empty disk from replacing the one that held the data.

A storage node that was among the last to serve a chain may return as its leader, with its content
as the content of the chain. That must not happen with another disk. mgmtd compares the id of each
target's store with the one with which it served; this module makes an earlier check for the whole
disk. Each data folder has an identity, which is written before the node first contacts mgmtd. A
disk without an identity belongs to a new node, of which mgmtd knows no target, or was wiped or
replaced. In the second case the node waits until mgmtd has marked each of its targets OFFLINE or
WAITING, which means that other replicas serve the chain. Only then it starts and is resynced.
"""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefs.cluster import write_atomically
from threefs.errors import InvalidArgument, ThreeFSError, Unavailable
from threefs.nodes import node_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IDENTITY_FILE", "authority_of", "take_disk"]

IDENTITY_FILE = "identity.json"
DISK_TIMEOUT_SECONDS = 3600.0
"""Time for which a replaced disk waits for other nodes before the process exits and restarts."""
REQUEST_SECONDS = 2.0
LOG_AGAIN_SECONDS = 30.0
NOT_LEADING = ("OFFLINE", "WAITING")


def take_disk(
    config: dict[str, Any],
    log: Callable[[str], None],
    timeout_seconds: float = DISK_TIMEOUT_SECONDS,
) -> None:
    """Return once the node of this configuration may serve the disk at its `data`."""
    folder, node = Path(config["data"]), int(config["node_id"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        has_identity = (folder / IDENTITY_FILE).exists()
    except OSError as error:
        raise InvalidArgument(
            f"--data: `{folder}` cannot be created or read: {error.strerror}; mount a volume that "
            "this user may write to"
        ) from error
    if has_identity:
        _check_owner(folder / IDENTITY_FILE, node)
        return
    if not any(folder.glob("target-*")):
        _wait_until_not_leading(config, log, timeout_seconds)
    identity = {"version": 1, "node": node, "disk": str(uuid.uuid4())}
    write_atomically(folder / IDENTITY_FILE, json.dumps(identity) + "\n")
    log(f"disk {identity['disk']} at {folder} now belongs to {node_name(node)}")


def authority_of(node: int, routing: dict[str, Any]) -> list[str]:
    """Chains that this node's disk could lead, each with the state of its target."""
    return [
        f"chain-{chain['id']} ({place['state']})"
        for chain in routing["chains"].values()
        for place in chain["targets"]
        if place["node"] == node and place["state"] not in NOT_LEADING
    ]


def _check_owner(path: Path, node: int) -> None:
    try:
        owner = int(json.loads(path.read_text())["node"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"`{path}` cannot be read: {error}; empty the damaged disk, then it is resynced from "
            "the others"
        ) from error
    if owner != node:
        raise InvalidArgument(
            f"the disk at `{path.parent}` belongs to {node_name(owner)} and this is "
            f"{node_name(node)}; mount the volume of this node (volumeClaimTemplates keep them "
            "apart)"
        )


def _wait_until_not_leading(
    config: dict[str, Any], log: Callable[[str], None], timeout_seconds: float
) -> None:
    from threefs import _native

    node = int(config["node_id"])
    # The metadata service is not needed here.
    client = _native.Client(
        config["mgmtd"],
        config["mgmtd"][0],
        config["key_file"],
        REQUEST_SECONDS,
        tls=config.get("tls", False),
    )
    deadline = time.monotonic() + timeout_seconds
    logged, logged_at = "", 0.0
    while time.monotonic() < deadline:
        try:
            chains = authority_of(node, json.loads(client.status())["routing"])
        except ThreeFSError as error:
            line = f"the disk is empty; waiting for mgmtd to report this node's chains: {error}"
        else:
            if not chains:
                return
            line = (
                f"the disk of {node_name(node)} is empty, but it could lead {', '.join(chains)}: "
                "waiting until other nodes serve these chains. If the old disk is lost, choose "
                "another copy of each with `threefs promote TARGET`"
            )
        if line != logged or time.monotonic() - logged_at > LOG_AGAIN_SECONDS:
            log(line)
            logged, logged_at = line, time.monotonic()
        time.sleep(0.2)
    raise Unavailable(f"{logged} (gave up after {timeout_seconds:g} s)", who="mgmtd")
