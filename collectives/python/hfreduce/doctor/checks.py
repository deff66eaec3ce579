"""The checks: functions from a machine and the wanted job to findings.

A finding needs an order of magnitude; a slowdown of some per cent is not reported.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

from hfreduce import _native
from hfreduce._native import Settings, load_topology
from hfreduce.doctor import network
from hfreduce.doctor.machine import Finding, Layout, Machine, numbers
from hfreduce.errors import SettingError, TopologyError
from hfreduce.sizes import size_text

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CHECKS", "examine"]

CHUNK_BYTES, SLOTS = 256 << 10, 32
"""The engine's defaults: what a node's ranks share is (ranks + 1) x slots x chunk."""

PROGRAM_DESCRIPTORS = 64
"""Descriptors that a training program has open itself."""

KERNEL = (5, 3)
"""The first one with pidfd_open, which detects the end of a local rank immediately."""


def examine(machine: Machine, layout: Layout) -> list[Finding]:
    """All findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(machine, layout)]


def kernel(machine: Machine, _: Layout) -> list[Finding]:
    """Old kernels see the end of a rank later."""
    release = machine.text("proc/sys/kernel/osrelease")
    version = re.match(r"(\d+)\.(\d+)", release)
    if not version:
        return [Finding("kernel", "warning", f"release `{release}` cannot be read")]
    if (int(version[1]), int(version[2])) < KERNEL:
        remedy = "install a kernel from 5.3 on: older ones report an ended rank only by its socket"
        return [Finding("kernel", "warning", f"Linux {release}", remedy)]
    return [Finding("kernel", "ok", f"Linux {release}")]


def locked_memory(machine: Machine, _: Layout) -> list[Finding]:
    """Reported because other libraries need it: HFReduce locks no memory."""
    limit = machine.limit("Max locked memory")
    soft = "unknown" if limit is None else _limit(limit[0])
    return [Finding("locked memory", "ok", f"{soft} allowed; none is needed")]


def open_files(machine: Machine, layout: Layout) -> list[Finding]:
    """A descriptor for every bell and socket; ranks raise the soft limit themselves."""
    name, limit = "open files", machine.limit("Max open files")
    required = PROGRAM_DESCRIPTORS + _native.descriptors_needed(layout.world_size, layout.ranks)
    if limit is None:
        return [Finding(name, "warning", "/proc/self/limits cannot be read")]
    soft, hard = limit
    detail = f"{soft:.0f} allowed, about {required} needed"
    if soft >= required:
        return [Finding(name, "ok", detail)]
    if hard >= required:
        return [Finding(name, "ok", f"{detail}: each rank raises its limit")]
    remedy = (
        f"raise the hard limit ({hard:.0f}) to {required}: LimitNOFILE= of the container "
        "runtime's unit, or nofile in /etc/security/limits.conf"
    )
    return [Finding(name, "problem", detail, remedy)]


def shared_memory(machine: Machine, _: Layout) -> list[Finding]:
    """It may be full: memory is shared through descriptors."""
    mounts = machine.text("proc/self/mountinfo").splitlines()
    sizes = [re.search(r"size=(\d+[kmg]?)", line) for line in mounts if " /dev/shm " in line]
    size = sizes[-1][1] if sizes and sizes[-1] else "unknown size"
    detail = f"{size} mounted; it may be full (ranks share through memfd)"
    return [Finding("shared memory", "ok", detail)]


def memory(machine: Machine, layout: Layout) -> list[Finding]:
    """Shared memory is charged to the control group of the process that touches it first."""
    required = (layout.ranks + 1) * SLOTS * CHUNK_BYTES
    folder = machine.cgroup("memory")
    limit = None
    if folder is not None:
        limit = machine.number(f"{folder}/memory.max")
        limit = limit or machine.number(f"{folder}/memory.limit_in_bytes")
    if limit is None or limit > 1 << 60:
        return [Finding("memory", "ok", f"no limit; the ranks share {size_text(required)}")]
    detail = f"limit {_limit(limit)}; the ranks share {size_text(required)} of it"
    if limit < 2 * required:
        remedy = (
            "raise resources.limits.memory of the container, or lower HFREDUCE_CHUNK_BYTES: what "
            "is shared counts as its memory"
        )
        return [Finding("memory", "problem", detail, remedy)]
    return [Finding("memory", "ok", detail)]


def processors(machine: Machine, layout: Layout) -> list[Finding]:
    """A rank without a processor sleeps instead of looking: small operations take longer."""
    name, allowed = "processors", len(numbers(machine.status("Cpus_allowed_list")))
    if not allowed:
        return [Finding(name, "warning", "/proc/self/status does not say which are allowed")]
    quota = _quota(machine)
    usable = min(float(allowed), quota) if quota else float(allowed)
    time = f", time of {quota:.1f} by the control group" if quota else ""
    detail = f"{allowed} allowed{time}; {layout.ranks} ranks"
    if usable >= layout.ranks:
        return [Finding(name, "ok", detail)]
    remedy = (
        f"give the container {layout.ranks} processors (resources.limits.cpu, whole numbers, and "
        "the kubelet's static CPU manager), or start fewer ranks: ranks that share processors "
        "sleep, and small operations take ten times as long"
    )
    return [Finding(name, "warning", detail, remedy)]


def _quota(machine: Machine) -> float | None:
    """Processors' worth of time that the control group grants."""
    folder = machine.cgroup("cpu")
    if folder is None:
        return None
    match = re.fullmatch(r"(\d+) (\d+)", machine.text(f"{folder}/cpu.max"))
    if match:
        return int(match[1]) / int(match[2])
    quota = machine.number(f"{folder}/cpu.cfs_quota_us")
    period = machine.number(f"{folder}/cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def numa(machine: Machine, _: Layout) -> list[Finding]:
    """Memory far from the processors that read it costs half of its speed."""
    name, findings = "numa", []
    folders = sorted((machine.root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(folders) < 2:
        return [Finding(name, "ok", "one node")]
    allowed = numbers(machine.status("Cpus_allowed_list"))
    with_processors = set()
    for folder in folders:
        if allowed & numbers(machine.text(f"sys/devices/system/node/{folder.name}/cpulist")):
            with_processors.add(int(folder.name.removeprefix("node")))
    with_memory = numbers(machine.status("Mems_allowed_list"))
    where = f"processors on {_list(with_processors)}, memory on {_list(with_memory)}"
    detail = f"{len(folders)} nodes; {where}"
    if with_processors - with_memory:
        remedy = (
            "let the container have memory where its processors are: the kubelet's "
            "memoryManagerPolicy=Static and topologyManagerPolicy=best-effort, or numactl"
        )
        findings.append(Finding(name, "warning", detail, remedy))
    else:
        findings.append(Finding(name, "ok", detail))
    if machine.text("proc/sys/kernel/numa_balancing") not in ("", "0"):
        remedy = "`sysctl -w kernel.numa_balancing=0`: it takes pages away to see who uses them"
        findings.append(Finding("numa balancing", "warning", "on", remedy))
    return findings


def huge_pages(machine: Machine, _: Layout) -> list[Finding]:
    """Huge pages reduce TLB misses, unless page faults wait for compaction."""
    folder = "sys/kernel/mm/transparent_hugepage"
    enabled, defrag = machine.chosen(f"{folder}/enabled"), machine.chosen(f"{folder}/defrag")
    if not enabled:
        return [Finding("huge pages", "ok", "the kernel has none; they are not needed")]
    detail = f"transparent: {enabled}, compaction: {defrag or 'unknown'}"
    if enabled == "always" and defrag == "always":
        remedy = (
            f"`echo defer+madvise > /{folder}/defrag`: a rank that touches new memory waits for "
            "compaction, and all ranks wait for that rank"
        )
        return [Finding("huge pages", "warning", detail, remedy)]
    return [Finding("huge pages", "ok", detail)]


def instructions(machine: Machine, _: Layout) -> list[Finding]:
    """Scalar sums are a sixth as fast."""
    name, current, best = "instructions", machine.instruction_set, machine.best_instruction_set
    if current != best:
        remedy = "unset HFREDUCE_ISA: all give the same bits"
        detail = f"{current}, by HFREDUCE_ISA; the processor has {best}"
        return [Finding(name, "warning", detail, remedy)]
    if current == "scalar":
        remedy = (
            "run on a processor with AVX2; in a virtual machine, pass the host's processor through"
        )
        return [Finding(name, "warning", "scalar: the processor shows no AVX2", remedy)]
    return [Finding(name, "ok", current)]


def gdrcopy(machine: Machine, _: Layout) -> list[Finding]:
    """Optional: small GPU tensors are some microseconds slower without it."""
    if not any((machine.root / "proc/driver/nvidia/gpus").glob("*")):
        return [Finding("gdrcopy", "ok", "no GPU here; not needed")]
    why = machine.without_gdrcopy
    detail = "small tensors of GPUs are copied by the processor"
    if why is not None:
        detail = f"small tensors of GPUs take some µs more by the copy engines: {why}"
    return [Finding("gdrcopy", "ok", detail)]


def tracing(machine: Machine, _: Layout) -> list[Finding]:
    """Reported because other libraries need it."""
    scope = machine.text("proc/sys/kernel/yama/ptrace_scope")
    mode = f"yama.ptrace_scope {scope}" if scope else "no yama"
    detail = f"{mode}; not needed (memory is shared through descriptors)"
    return [Finding("ptrace", "ok", detail)]


def settings(machine: Machine, _: Layout) -> list[Finding]:
    """Variables that a job would stumble over."""
    with warnings.catch_warnings(record=True) as warning_entries:
        warnings.simplefilter("always")
        try:
            values = Settings.read(machine.environment)
            values.key()
        except SettingError as error:
            return [Finding("settings", "problem", str(error), f"correct or unset {error.name}")]
    findings = [
        Finding("settings", "warning", str(entry.message), "correct the name, or unset it")
        for entry in warning_entries
    ]
    names = sorted(name for name in machine.environment if name.startswith("HFREDUCE_"))
    detail = ", ".join(names) if names else "all at their defaults"
    findings = findings or [Finding("settings", "ok", detail)]
    if values.topology_path is not None:
        findings.append(_topology(values.topology_path))
    return findings


def _topology(path: str) -> Finding:
    try:
        topology = load_topology(path)
    except (TopologyError, OSError) as error:
        remedy = "write the file anew, or unset FLYER_TOPOLOGY: ranks then ask for host names"
        return Finding("topology", "problem", str(error), remedy)
    zones = {place.zone for place in topology.nodes}
    return Finding("topology", "ok", f"{len(topology.nodes)} nodes in {len(zones)} zones")


def _limit(size_bytes: float) -> str:
    return "unlimited" if size_bytes == float("inf") else size_text(size_bytes)


def _list(those: set[int]) -> str:
    return ",".join(map(str, sorted(those))) or "none"


CHECKS: tuple[Callable[[Machine, Layout], list[Finding]], ...] = (
    kernel,
    instructions,
    processors,
    numa,
    memory,
    huge_pages,
    shared_memory,
    locked_memory,
    open_files,
    gdrcopy,
    tracing,
    network.interfaces,
    network.congestion,
    network.buffers,
    settings,
)
