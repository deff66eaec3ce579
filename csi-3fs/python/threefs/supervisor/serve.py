"""Supervisor loop: starts services, reports readiness, restarts them, stops on a signal."""

from __future__ import annotations

import json
import os
import selectors
import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from threefs.client import Client
from threefs.cluster import ClusterFile
from threefs.errors import ThreeFSError, Unavailable
from threefs.etcd import Metadata
from threefs.nodes import service_of
from threefs.supervisor.conversion import convert
from threefs.supervisor.folder import DataFolder
from threefs.supervisor.members import (
    MEMBER_NAMES,
    find_program,
    member_ports,
    members,
    own_cluster,
)
from threefs.supervisor.plan import meta_names, mgmtd_names, service_names, services
from threefs.supervisor.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from threefs.supervisor.options import ServeOptions
    from threefs.supervisor.plan import Service

__all__ = ["Supervisor"]

POLL_SECONDS = 0.05
WAKE_SECONDS = 1.0
"""Longest wait of a cluster that is ready: SIGCHLD ends it as well."""
FAILED_STARTS_MAX = 5
PROBE_SECONDS = 1.0


class Supervisor:
    """Runs one cluster in the foreground."""

    def __init__(self, options: ServeOptions, log: Callable[[str], None]) -> None:
        options.check()
        self._etcd_program = find_program(options.etcd_binary) if options.may_run_members else ""
        self._options = options
        self._log = log
        self._folder = DataFolder(options.data)
        self._stopping = False
        self._ready = threading.Event()
        self._reason = "no answer yet"
        self._chains = 0

    def run(self, on_ready: Callable[[str], None]) -> None:
        """Serve until SIGTERM or SIGINT; `on_ready` gets one line when the cluster can be used."""
        self._folder.take()
        try:
            self._serve(on_ready)
        finally:
            self._folder.release()

    def _serve(self, on_ready: Callable[[str], None]) -> None:
        folder = self._folder
        folder.check_metadata(self._options)
        ports = member_ports() if self._etcd_program else []
        addresses = folder.addresses(self._options, [*service_names(self._options), *ports])
        folder.make_disks(self._options)
        options, planned = self._with_members(addresses)
        planned += services(options, addresses, folder.key_file, folder.path / "data")
        cluster = ClusterFile(
            mgmtd=tuple(addresses[name] for name in mgmtd_names(options)),
            meta=tuple(addresses[name] for name in meta_names(options)),
            key_file=str(folder.key_file),
            services={service.name: service.address for service in planned},
            supervisor_pid=os.getpid(),
            tls=options.tls,
            etcd=options.etcd,
        )
        processes = Processes(planned, folder, options.restart_after_seconds, self._log)
        wake = self._catch_signals()
        try:
            processes.start_all()
            threading.Thread(target=self._probe, args=(cluster,), daemon=True).start()
            self._loop(processes, cluster, wake, on_ready)
        finally:
            processes.stop_all()
            if folder.cluster_file.exists():
                self._publish(cluster, {})

    def _with_members(self, addresses: dict[str, str]) -> tuple[ServeOptions, list[Service]]:
        """The options with the endpoints of the etcd members that run here, and the members."""
        options, folder = self._options, self._folder
        if not self._etcd_program:
            return options, []
        folder.check_members(MEMBER_NAMES)
        etcd = own_cluster(folder, addresses)
        planned = members(self._etcd_program, etcd, addresses, folder.path / "data")
        if folder.metadata() is not options.metadata:
            convert(folder, options.metadata, etcd, planned, self._log)
        if options.metadata is Metadata.EMBEDDED:
            return options, []
        return replace(options, etcd=etcd), planned

    def _loop(
        self,
        processes: Processes,
        cluster: ClusterFile,
        wake: selectors.BaseSelector,
        on_ready: Callable[[str], None],
    ) -> None:
        deadline = time.monotonic() + self._options.ready_timeout_seconds
        announced = False
        while not self._stopping:
            changed = processes.poll()
            if not announced and self._ready.is_set():
                self._publish(cluster, processes.pids())
                self._folder.set_metadata(self._options.metadata)
                on_ready(self._ready_line())
                announced = True
            elif not announced:
                self._check_start(processes, deadline)
            elif changed:
                self._publish(cluster, processes.pids())
            longest = WAKE_SECONDS if announced else POLL_SECONDS
            for key, _ in wake.select(processes.pause_seconds(longest)):
                os.read(key.fd, 64)

    def _check_start(self, processes: Processes, deadline: float) -> None:
        for child in processes.children:
            if len(child.ends) >= FAILED_STARTS_MAX:
                name = child.service.name
                raise Unavailable(
                    f"{name} ended {FAILED_STARTS_MAX} times while the cluster started: "
                    f"{processes.tail(name)} (log: {self._folder.log(name)})",
                    who=name,
                )
        if time.monotonic() > deadline:
            seconds = self._options.ready_timeout_seconds
            raise Unavailable(
                f"the cluster in `{self._folder.path}` was not ready after {seconds:g} s: "
                f"{self._reason} (logs: {self._folder.path / 'logs'})",
                deadline_seconds=seconds,
            )

    def _probe(self, cluster: ClusterFile) -> None:
        """Poll the cluster in a separate thread until every chain is complete."""
        with Client(cluster, timeout_seconds=PROBE_SECONDS) as client:
            while not self._stopping:
                try:
                    status = json.loads(client.status())
                    self._reason = reason_not_ready(status, self._options)
                    self._chains = status["cluster"]["chains"]
                except ThreeFSError as error:
                    self._reason = str(error)
                if not self._reason:
                    self._ready.set()
                    return
                time.sleep(POLL_SECONDS)

    def _ready_line(self) -> str:
        options = self._options
        storage = f"{options.storage} storage services"
        if options.disks > 1:
            storage += f" of {options.disks} disks"
        return (
            f"ready: {storage}, {self._chains} chains of {options.replicas} replicas; "
            f"cluster file {self._folder.cluster_file}"
        )

    def _publish(self, cluster: ClusterFile, pids: dict[str, int]) -> None:
        supervisor = cluster.supervisor_pid if pids else None
        published = replace(cluster, pids=pids, supervisor_pid=supervisor)
        published.write(self._folder.cluster_file)

    def _catch_signals(self) -> selectors.BaseSelector:
        """SIGTERM and SIGINT stop the loop, SIGCHLD wakes it."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        wake = selectors.DefaultSelector()
        wake.register(reader, selectors.EVENT_READ)
        return wake

    def _stop(self, _number: int, _frame: object) -> None:
        self._stopping = True


def reason_not_ready(status: dict[str, Any], options: ServeOptions) -> str:
    """Why a cluster is not ready yet; empty if it is."""
    cluster, disks = status["cluster"], options.storage * options.disks
    if cluster["chains"] == 0:
        alive = {service_of(node["node"]) for node in cluster["nodes"] if node["alive"]}
        return (
            f"no chains yet, {len(alive)} of {cluster['nodes_expected']} storage services are alive"
        )
    # One that was lost later is registered, and its chains are not whole until it is replaced.
    if len(cluster["nodes"]) < disks:
        return f"{len(cluster['nodes'])} of {disks} disks have registered"
    if cluster["chains_whole"] < cluster["chains"]:
        return f"{cluster['chains_whole']} of {cluster['chains']} chains are whole"
    if status["meta"] is None:
        return str(status["meta_trouble"])
    for service in (*status["mgmtds"], *status["metas"]):
        if service["state"] not in ("serving", "standby"):
            return f"{service['address']} is {service['state']}: {service['detail']}"
    return ""
