"""Cost of a load: CPU time of each process, and the API server's metrics of its requests.

The API server's metrics are read before and after; the difference is reported as requests by verb
and resource, admission, storage and watch events. With an output folder, the server is profiled
meanwhile (`go tool pprof -top FILE`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from bench.report import cpu_seconds
from testcluster.control_plane import API_SERVER, CONTROLLER_MANAGER, ETCD
from testcluster.kwok import KWOK
from testcluster.processes import Process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from testcluster.state import State

__all__ = ["Costs", "account", "parse"]

PROCESSES: Final = (API_SERVER, ETCD, CONTROLLER_MANAGER, KWOK)
PROFILE_SECONDS: Final = 5
_LINE: Final = re.compile(r"^([a-z_]+)(?:\{(.*)\})? ([0-9.e+-]+)$")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Reported metrics and their labels. Reads are excluded: the benchmark itself reads while it waits.
_CALLS: Final = "apiserver_request_duration_seconds"
_BODIES: Final = "apiserver_request_body_size_bytes"
_POLICIES: Final = (
    "apiserver_validating_admission_policy_check_duration_seconds",
    "apiserver_mutating_admission_policy_check_duration_seconds",
)
_PLUGINS: Final = "apiserver_admission_controller_admission_duration_seconds"
_STORE: Final = "etcd_request_duration_seconds"
_EVENTS: Final = "apiserver_watch_events_sizes"
_WRITES: Final = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")
_SHOWN_SECONDS: Final = 0.005

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class _Operator(Protocol):
    def cpu_seconds(self) -> float: ...


class _Testbed(Protocol):
    """The part of `bench.sched.testbed.Testbed` that costs need."""

    state: State

    @property
    def operators(self) -> Sequence[_Operator]: ...


def parse(text: str) -> Samples:
    """Sums and counts of a page of metrics; buckets are left out."""
    samples: Samples = {}
    for line in text.splitlines():
        if line.startswith("#") or "_bucket" in line:
            continue
        if match := _LINE.match(line):
            name, labels, value = match.groups()
            samples[name, frozenset(_LABEL.findall(labels or ""))] = float(value)
    return samples


@dataclass(frozen=True, slots=True)
class _Sum:
    count: float = 0.0
    total: float = 0.0


def _grown(before: Samples, after: Samples, metric: str, *keys: str) -> dict[tuple[str, ...], _Sum]:
    """The increase of a histogram, for each value of these labels."""
    counts: dict[tuple[str, ...], list[float]] = {}
    for (name, labels), value in after.items():
        part = name.removeprefix(f"{metric}_")
        if name == part or part not in ("count", "sum"):
            continue
        label_values: Mapping[str, str] = dict(labels)
        place = counts.setdefault(tuple(label_values.get(key, "") for key in keys), [0.0, 0.0])
        place[part == "sum"] += value - before.get((name, labels), 0.0)
    return {key: _Sum(*total) for key, total in counts.items() if total[0] > 0}


def account(before: Samples, after: Samples) -> dict[str, Any]:
    """Calls with their mean milliseconds and bytes, and the server's other work."""
    bodies = _grown(before, after, _BODIES, "verb", "resource")
    calls = {}
    for (verb, resource, part), total in _most(
        _grown(before, after, _CALLS, "verb", "resource", "subresource")
    ):
        if verb not in _WRITES:
            continue
        kind = f"{resource}/{part}" if part else resource
        calls[f"{verb} {kind}"] = {
            "count": int(total.count),
            "milliseconds": round(1e3 * total.total / total.count, 2),
        }
    sizes = {
        f"{verb} {resource}": round(total.total / total.count)
        for (verb, resource), total in bodies.items()
    }
    admission = {
        f"policy {name}": _entry(total)
        for metric in _POLICIES
        for (name,), total in _most(_grown(before, after, metric, "policy"))
    } | {
        f"plugin {name}, {phase}, of {operation}": _entry(total)
        for (name, phase, operation), total in _most(
            _grown(before, after, _PLUGINS, "name", "type", "operation")
        )
        if total.total > _SHOWN_SECONDS
    }
    events = {
        resource: {"count": int(total.count), "bytes": round(total.total / total.count)}
        for (resource,), total in _most(_grown(before, after, _EVENTS, "resource"))
        if total.count > 1
    }
    store = {
        f"{operation} {kind}": _entry(total)
        for (operation, kind), total in _most(_grown(before, after, _STORE, "operation", "type"))
        if total.total > _SHOWN_SECONDS
    }
    return {
        "calls": calls,
        "bytes of requests": sizes,
        "admission": admission,
        "events sent to watches": events,
        "store": store,
    }


def _entry(total: _Sum) -> dict[str, float]:
    return {"count": int(total.count), "milliseconds": round(1e3 * total.total / total.count, 3)}


def _most(sums: dict[tuple[str, ...], _Sum]) -> list[tuple[tuple[str, ...], _Sum]]:
    return sorted(sums.items(), key=lambda item: -item[1].total)


class Costs:
    """Resource usage of one testbed."""

    def __init__(self, testbed: _Testbed, profiles: Path | None = None) -> None:
        self._testbed = testbed
        self._profiles = profiles
        self._context: ssl.SSLContext | None = None

    @contextlib.asynccontextmanager
    async def of(self, name: str, details: dict[str, Any]) -> AsyncIterator[None]:
        """Store the cost of the body in `details` under this name."""
        before = await asyncio.to_thread(self._get, "/metrics")
        profile = None
        if self._profiles is not None:
            path = f"/debug/pprof/profile?seconds={PROFILE_SECONDS}"
            profile = asyncio.create_task(asyncio.to_thread(self._get, path))
        cpu_before, started = self._spent(), time.monotonic()
        yield
        seconds, now = time.monotonic() - started, self._spent()
        after = await asyncio.to_thread(self._get, "/metrics")
        if profile is not None and self._profiles is not None:
            self._profiles.mkdir(parents=True, exist_ok=True)
            path_out = self._profiles / f"{name.replace(' ', '-').replace(',', '')}.pprof"
            path_out.write_bytes(await profile)
        details[name] = {
            "seconds": round(seconds, 2),
            "processor seconds": {
                process: round(now[process] - cpu_before[process], 2) for process in now
            },
            **account(parse(before.decode()), parse(after.decode())),
        }

    def _spent(self) -> dict[str, float]:
        seconds = {}
        for name in PROCESSES:
            pids = Process.load(self._testbed.state, name).pids()
            seconds[name] = sum(map(cpu_seconds, pids))
        if self._testbed.operators:
            seconds["flyer-operator"] = self._testbed.operators[-1].cpu_seconds()
        return seconds

    def _get(self, path: str) -> bytes:
        if self._context is None:
            pki = self._testbed.state.folder / "pki"
            self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
            self._context.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))
        url = self._testbed.state.server + path
        with urllib.request.urlopen(url, timeout=60, context=self._context) as response:
            return bytes(response.read())
