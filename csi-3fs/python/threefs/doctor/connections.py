"""Checks of a client's configuration: its cluster file, its credential, and TCP to each service."""

from __future__ import annotations

import socket
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from threefs import _native
from threefs.doctor.finding import Finding, Severity
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from threefs.cluster import ClusterFile

__all__ = ["check_credential", "check_services", "unreachable"]

CONNECT_SECONDS = 3.0
CONNECTIONS_AT_ONCE = 64
EXPIRY_WARNING_SECONDS = 600.0
LISTED_MAX = 8


def check_credential(cluster: ClusterFile, now_unix_s: float) -> Finding:
    """Whether the key or the ticket can be read, is private, and is valid."""
    name, path = "credential", Path(cluster.key_file)
    try:
        path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        remedy = "run as a user that may read it, or issue one with `threefs credential issue`"
        return Finding(name, Severity.PROBLEM, f"{path} cannot be read: {error}", remedy)
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return Finding(
            name,
            Severity.WARNING,
            f"{path} has mode {stat.S_IMODE(mode):o}: other users can read it",
            f"chmod 600 {path}",
        )
    try:
        _, _, directory, _, _, expires_unix_s = _native.read_ticket(str(path))
    except (ThreeFSError, OSError, ValueError):
        return Finding(name, Severity.OK, f"key of the cluster, {path}")
    remaining = expires_unix_s - now_unix_s
    detail = f"ticket for {directory} that expires in {remaining:.0f} s"
    remedy = "issue another with `threefs credential issue`, or see why it is not renewed"
    if remaining <= 0:
        detail = f"ticket for {directory} that expired {-remaining:.0f} s ago by this clock"
        return Finding(name, Severity.PROBLEM, detail, remedy)
    if remaining < EXPIRY_WARNING_SECONDS:
        return Finding(name, Severity.WARNING, detail, remedy)
    return Finding(name, Severity.OK, detail)


def unreachable(addresses: Iterable[str]) -> dict[str, str]:
    """The addresses `host:port` that accept no TCP connection, each with the reason."""
    distinct = sorted(set(addresses))
    with ThreadPoolExecutor(CONNECTIONS_AT_ONCE) as pool:
        reasons = dict(zip(distinct, pool.map(_refusal, distinct), strict=True))
    return {address: reason for address, reason in reasons.items() if reason is not None}


def _refusal(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    started = time.monotonic()
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
            return None
    except TimeoutError:
        return f"no answer within {time.monotonic() - started:.0f} s"
    except (OSError, ValueError, OverflowError) as error:
        return str(error)


def check_services(kind: str, addresses: Iterable[str], refusals: dict[str, str]) -> Finding:
    """Whether all services of a kind accept connections from this machine."""
    known = sorted(set(addresses))
    refused = [address for address in known if address in refusals]
    if not refused:
        detail = f"{len(known)} of {len(known)} accept connections"
        return Finding(f"{kind} connections", Severity.OK, detail)
    listed = "; ".join(f"{address}: {refusals[address]}" for address in refused[:LISTED_MAX])
    if len(refused) > LISTED_MAX:
        listed += f"; and {len(refused) - LISTED_MAX} more"
    return Finding(
        f"{kind} connections",
        Severity.PROBLEM,
        f"{len(refused)} of {len(known)} are not reachable from this machine: {listed}",
        "check that the service runs, the address in cluster.json or in its settings, routes, "
        "firewalls and network policies",
    )
