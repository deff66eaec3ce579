"""Checks of the network to other machines."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from hfreduce.doctor.machine import Finding

if TYPE_CHECKING:
    from hfreduce.doctor.machine import Interface, Layout, Machine

__all__ = ["buffers", "congestion", "interfaces"]

SPEED_MBPS = 10_000
"""Below that, gradients take longer than most steps."""

BUFFER_BYTES = 1 << 20
"""100 Gb/s over a path of 100 µs keeps 1.2 MB under way."""

_CONGESTION = {"cubic", "dctcp", "reno"}
"""Algorithms for the short round trips of a data centre."""


def interfaces(machine: Machine, layout: Layout) -> list[Finding]:
    """The interface that leads to the peers, and whether ranks have to probe for it."""
    name, up = "interfaces", machine.interfaces()
    if not up:
        detail = "none is up but loopback: one machine only"
        status = "problem" if layout.world_size > layout.ranks else "ok"
        return [Finding(name, status, detail, "bring one up" if status == "problem" else "")]
    listed = ", ".join(map(_describe, up))
    findings = [Finding(name, "ok", f"up: {listed}"), _address(machine, layout)]
    ways = [interface for interface in up if not interface.virtual]
    return findings + _route(machine, layout, ways or up)


def _address(machine: Machine, layout: Layout) -> Finding:
    """The address at which peers would reach the ranks of this machine."""
    setting = machine.environment.get("HFREDUCE_ADDRESS") or None
    peer = layout.peer or machine.environment.get("MASTER_ADDR") or None
    by = f"by HFREDUCE_ADDRESS={setting}" if setting else "by the routes"
    try:
        addresses = machine.reached_at(setting, peer)
    except ValueError as error:
        return Finding("address", "problem", str(error), "name one of those in HFREDUCE_ADDRESS")
    if not addresses:
        return Finding("address", "ok", "none: one machine only")
    rest = f", else {', '.join(addresses[1:])}" if addresses[1:] else ""
    return Finding("address", "ok", f"others reach {addresses[0]}, chosen {by}{rest}")


def _route(machine: Machine, layout: Layout, ways: list[Interface]) -> list[Finding]:
    """The interface that leads to the peer, or anywhere."""
    peer = layout.peer or machine.environment.get("MASTER_ADDR", "")
    address = _ipv4(peer) or "0.0.0.0"  # noqa: S104  (the default route's destination)
    to = peer if _ipv4(peer) else "other networks"
    if peer and ipaddress.ip_address(address).is_loopback:
        return [Finding("route", "ok", f"{peer} is this machine")]
    interface = machine.route(address)
    if interface is None:
        # Without a default route a flat network may still be reached.
        status = "problem" if to == peer else "ok"
        remedy = f"`ip route get {peer}` says why" if status == "problem" else ""
        return [Finding("route", status, f"none to {to}", remedy)]
    detail = f"{to} through {interface}"
    way = next((candidate for candidate in ways if candidate.name == interface), None)
    if way is not None and way.speed_mbps is not None and way.speed_mbps < SPEED_MBPS:
        faster = [other for other in ways if (other.speed_mbps or 0) > way.speed_mbps]
        remedy = (
            f"HFREDUCE_ADDRESS={faster[0].name} ({faster[0].speed_mbps} Mb/s)"
            if faster
            else f"allreduce cannot pass {way.speed_mbps / 16:.0f} MB/s between machines: use a "
            "faster network, or fewer and larger steps"
        )
        return [Finding("route", "warning", f"{detail}, {way.speed_mbps} Mb/s", remedy)]
    return [Finding("route", "ok", detail)]


def congestion(machine: Machine, _: Layout) -> list[Finding]:
    """Algorithms for long paths lose throughput on short ones."""
    name, folder = "congestion control", "proc/sys/net/ipv4"
    algorithm = machine.text(f"{folder}/tcp_congestion_control")
    if algorithm in _CONGESTION or not algorithm:
        return [Finding(name, "ok", algorithm or "unknown")]
    available = machine.text(f"{folder}/tcp_available_congestion_control").split()
    better = "cubic" if "cubic" in available or not available else available[0]
    remedy = (
        f"`sysctl -w net.ipv4.tcp_congestion_control={better}` in the job's network namespace: "
        f"{algorithm} was made for long paths"
    )
    return [Finding(name, "warning", algorithm, remedy)]


def buffers(machine: Machine, _: Layout) -> list[Finding]:
    """Maximum socket buffers of one connection."""
    findings = []
    for name in ("tcp_wmem", "tcp_rmem"):
        fields = machine.text(f"proc/sys/net/ipv4/{name}").split()
        if len(fields) != 3 or int(fields[2]) >= BUFFER_BYTES:
            continue
        remedy = f'`sysctl -w net.ipv4.{name}="{fields[0]} {fields[1]} {16 << 20}"`'
        detail = f"{name} ends at {fields[2]} bytes: fast links stay empty"
        findings.append(Finding("socket buffers", "warning", detail, remedy))
    return findings or [Finding("socket buffers", "ok", "they grow as far as fast links need")]


def _ipv4(text: str) -> str | None:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        return None


def _describe(interface: Interface) -> str:
    speed = "" if interface.speed_mbps is None else f" {interface.speed_mbps} Mb/s"
    mtu = "" if interface.mtu is None else f" mtu {interface.mtu}"
    return f"{interface.name}{speed}{mtu}"
