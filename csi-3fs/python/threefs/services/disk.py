"""Disk identity: prevents an empty disk from being taken for the one that held the data.

A storage node that was among the last to serve a chain may come back as its authority: what it
holds is what the chain holds. That must not happen with another disk. mgmtd compares the id of each
target's store with the one that it served with; this is the check before that, for a whole disk.
Each data folder therefore carries an
identity, written before the node first speaks to mgmtd. A disk without one belongs either to a node
that is new (mgmtd knows no target of it), or to one whose disk was wiped or replaced. Then the node
stays silent until mgmtd has counted each of its targets out (OFFLINE or WAITING), which means that
somebody else serves the chain, and only then comes back to be synced from it.
"""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefs.cluster import write_atomically
from threefs.errors import InvalidArgument, ThreeFSError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["IDENTITY_FILE", "authority_of", "take_disk"]

IDENTITY_FILE = "identity.json"
DISK_TIMEOUT_SECONDS = 3600.0
"""How long a replaced disk waits for the other nodes before the process exits and is restarted."""
ASK_SECONDS = 2.0
SAY_AGAIN_SECONDS = 30.0
COUNTED_OUT = ("OFFLINE", "WAITING")


def take_disk(
    config: dict[str, Any],
    say: Callable[[str], None],
    timeout_seconds: float = DISK_TIMEOUT_SECONDS,
) -> None:
    """Return once the node of this configuration may speak for the disk at its `data`."""
    folder, node = Path(config["data"]), int(config["node_id"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        known = (folder / IDENTITY_FILE).exists()
    except OSError as error:
        raise InvalidArgument(
            f"--data: `{folder}` cannot be made or read: {error.strerror}; mount a volume that "
            "this user may write to"
        ) from error
    if known:
        _check_owner(folder / IDENTITY_FILE, node)
        return
    if not any(folder.glob("target-*")):
        _wait_until_counted_out(config, say, timeout_seconds)
    identity = {"version": 1, "node": node, "disk": str(uuid.uuid4())}
    write_atomically(folder / IDENTITY_FILE, json.dumps(identity) + "\n")
    say(f"disk {identity['disk']} at {folder} is node-{node}'s from now on")


def authority_of(node: int, routing: dict[str, Any]) -> list[str]:
    """Chains that would believe this node's disk, each with the state of its target there."""
    return [
        f"chain-{chain['id']} ({place['state']})"
        for chain in routing["chains"].values()
        for place in chain["targets"]
        if place["node"] == node and place["state"] not in COUNTED_OUT
    ]


def _check_owner(path: Path, node: int) -> None:
    try:
        owner = int(json.loads(path.read_text())["node"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(
            f"`{path}` cannot be read: {error}; a damaged disk must be emptied, then it is synced "
            "from the others"
        ) from error
    if owner != node:
        raise InvalidArgument(
            f"the disk at `{path.parent}` is node-{owner}'s and this is node-{node}; mount the "
            "volume of this node (volumeClaimTemplates keep them apart)"
        )


def _wait_until_counted_out(
    config: dict[str, Any], say: Callable[[str], None], timeout_seconds: float
) -> None:
    from threefs import _native

    node = int(config["node_id"])
    # The metadata service is not asked for anything that is needed here.
    client = _native.Client(
        config["mgmtd"],
        config["mgmtd"][0],
        config["key_file"],
        ASK_SECONDS,
        tls=config.get("tls", False),
    )
    deadline = time.monotonic() + timeout_seconds
    said, said_at = "", 0.0
    while time.monotonic() < deadline:
        try:
            chains = authority_of(node, json.loads(client.status())["routing"])
        except ThreeFSError as error:
            line = f"the disk is empty; waiting for mgmtd to say whether it was always: {error}"
        else:
            if not chains:
                return
            line = (
                f"the disk of node-{node} is empty, but {', '.join(chains)} would take it for the "
                "newest copy: waiting until other nodes serve them. If the old disk is lost, "
                "choose another copy of each with `threefs promote TARGET`"
            )
        if line != said or time.monotonic() - said_at > SAY_AGAIN_SECONDS:
            say(line)
            said, said_at = line, time.monotonic()
        time.sleep(0.2)
    raise Unavailable(f"{said} (gave up after {timeout_seconds:g} s)", who="mgmtd")
