"""`threefs-service`: one service of 3FS in the foreground, for containers.

| command | port | what its pod needs |
|---|---|---|
| `threefs-service mgmtd` | 9000 | a volume at `--data` and one replica, or a shared store |
| `threefs-service meta` | 9001 | a volume at `--data` and one replica, or a shared store |
| `threefs-service storage` | 9002 | a volume at `--data` and each `--disk`; node id: ordinal + 1 |
| `threefs-service check KIND` | | exec probes: alive by default, `--ready` for readiness |

Every option can be given as a `THREEFS_…` variable. The cluster's key is read from a file, which a
Secret mounts; it is never an argument. SIGTERM shuts a service down: a storage node first notifies
mgmtd, so that the chains continue without it at once.
"""

# ruff: noqa: FBT002 -- options of a command.

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from threefs.cli.output import bytes_of
from threefs.cli.shared_store import with_shared_store
from threefs.errors import InvalidArgument, ThreeFSError
from threefs.exit_status import report_error
from threefs.location import location_of, read_location
from threefs.services.settings import (
    META_PORT,
    MGMTD_PORT,
    SCRUB_INTERVAL_HOURS,
    STORAGE_PORT,
    meta_config,
    mgmtd_config,
    node_id_of,
    storage_config,
    tls_config,
)
from threefs.shared_store import NO_SHARED_STORE, SharedStore

__all__ = ["app", "main"]

app = typer.Typer(
    name="threefs-service",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="One service of 3FS in the foreground, for containers.",
)

Data = Annotated[
    Path, typer.Option("--data", envvar="THREEFS_DATA", help="Folder on a separate volume.")
]
OptionalData = Annotated[
    Path | None,
    typer.Option(
        "--data",
        envvar="THREEFS_DATA",
        help="Folder on a separate volume; not used with a shared store.",
    ),
]
KeyFile = Annotated[
    Path,
    typer.Option(
        "--key-file",
        envvar="THREEFS_KEY_FILE",
        help="File with the cluster's key, or with two keys during a rotation.",
    ),
]
Mgmtd = Annotated[
    str,
    typer.Option(
        "--mgmtd", envvar="THREEFS_MGMTD", help="host:port of mgmtd; several with commas."
    ),
]
Listen = Annotated[str, typer.Option(envvar="THREEFS_LISTEN", help="host:port to listen on.")]
Advertise = Annotated[
    str,
    typer.Option(
        "--advertise",
        envvar="THREEFS_ADVERTISE",
        help="host:port at which others reach the service; the pod's stable DNS name.",
    ),
]
Tls = Annotated[
    bool,
    typer.Option(
        "--tls/--no-tls",
        envvar="THREEFS_TLS",
        help="Use TLS for outgoing connections, and require it for incoming ones.",
    ),
]
TlsTransition = Annotated[
    bool,
    typer.Option(
        envvar="THREEFS_TLS_TRANSITION",
        help="Accept connections with and without TLS, during a transition.",
    ),
]
NodeFailure = Annotated[
    int,
    typer.Option(
        "--node-failure-ms",
        envvar="THREEFS_NODE_FAILURE_MS",
        help="Milliseconds of silence after which a storage node is dead.",
    ),
]


@app.command()
@with_shared_store
def mgmtd(
    key_file: KeyFile,
    data: OptionalData = None,
    storage_nodes: Annotated[
        int,
        typer.Option(
            envvar="THREEFS_STORAGE_NODES",
            help="Number of storage services that register before the first chains are created.",
        ),
    ] = 3,
    replicas: Annotated[
        int,
        typer.Option(
            envvar="THREEFS_REPLICAS", help="Copies of a chunk; at most the number of services."
        ),
    ] = 3,
    chains_per_node: Annotated[
        int,
        typer.Option(
            envvar="THREEFS_CHAINS_PER_NODE", help="Chains per disk, counted by their heads."
        ),
    ] = 2,
    node_failure_ms: NodeFailure = 10_000,
    rebalance: Annotated[
        bool,
        typer.Option(
            envvar="THREEFS_REBALANCE",
            help="Add chains and move replicas automatically when storage nodes are added.",
        ),
    ] = True,
    listen: Listen = f"0.0.0.0:{MGMTD_PORT}",
    advertise: Advertise = "",
    tls: Tls = False,
    tls_transition: TlsTransition = False,
    shared: SharedStore = NO_SHARED_STORE,
) -> None:
    """Run the cluster manager."""
    config = mgmtd_config(
        listen=listen,
        advertise=advertise,
        data=data,
        key_file=key_file,
        storage_nodes=storage_nodes,
        replicas=replicas,
        chains_per_node=chains_per_node,
        node_failure_ms=node_failure_ms,
        rebalance=rebalance,
        shared=shared,
    )
    _serve("mgmtd", config | tls_config(enabled=tls, transition=tls_transition))


@app.command()
@with_shared_store
def meta(
    key_file: KeyFile,
    mgmtd: Mgmtd,
    data: OptionalData = None,
    chunk_size: Annotated[
        str, typer.Option(envvar="THREEFS_CHUNK_SIZE", help="Bytes of a file chunk.")
    ] = "1M",
    listen: Listen = f"0.0.0.0:{META_PORT}",
    tls: Tls = False,
    tls_transition: TlsTransition = False,
    shared: SharedStore = NO_SHARED_STORE,
) -> None:
    """Run the metadata service."""
    config = meta_config(
        listen=listen,
        data=data,
        key_file=key_file,
        mgmtd=mgmtd,
        chunk_bytes=bytes_of(chunk_size),
        shared=shared,
    )
    _serve("meta", config | tls_config(enabled=tls, transition=tls_transition))


@app.command()
def storage(
    data: Data,
    key_file: KeyFile,
    mgmtd: Mgmtd,
    disk: Annotated[
        list[Path] | None,
        typer.Option(
            envvar="THREEFS_DISKS",
            help="Folder on a further disk, like --data; repeated, in the variable with colons.",
        ),
    ] = None,
    node_id: Annotated[
        int,
        typer.Option(
            envvar="THREEFS_NODE_ID",
            help="Number of this service, from 1; 0: the ordinal of the pod's name, plus 1.",
        ),
    ] = 0,
    pod_name: Annotated[
        str, typer.Option(envvar="POD_NAME", help="The pod's name; default: the host's name.")
    ] = "",
    capacity: Annotated[
        str,
        typer.Option(
            envvar="THREEFS_CAPACITY",
            help="Capacity of each disk in bytes; 0: the size of its file system.",
        ),
    ] = "0",
    zone: Annotated[
        str, typer.Option(envvar="THREEFS_ZONE", help="Zone of this node; empty: unknown.")
    ] = "",
    rack: Annotated[
        str, typer.Option(envvar="THREEFS_RACK", help="Rack in the zone; empty: unknown.")
    ] = "",
    location_file: Annotated[
        Path | None,
        typer.Option(
            envvar="THREEFS_LOCATION_FILE",
            help="File of `threefs-service locate` with the zone and the rack.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            envvar="THREEFS_HOST",
            help="Machine that several storage services may share; empty: unknown.",
        ),
    ] = "",
    node_failure_ms: NodeFailure = 10_000,
    scrub_interval_hours: Annotated[
        int,
        typer.Option(
            envvar="THREEFS_SCRUB_INTERVAL_HOURS",
            help="Hours from one scrub of a target to the next; 0: only `threefs scrub --now`.",
        ),
    ] = SCRUB_INTERVAL_HOURS,
    scrub_rate: Annotated[
        str,
        typer.Option(
            envvar="THREEFS_SCRUB_RATE",
            help="Bytes per second that scrubs read of a disk; a quarter while clients use it.",
        ),
    ] = "32M",
    listen: Listen = f"0.0.0.0:{STORAGE_PORT}",
    advertise: Advertise = "",
    tls: Tls = False,
    tls_transition: TlsTransition = False,
) -> None:
    """Run a storage service.

    Each disk is a node of mgmtd: node-N is the first, the further ones are node-N.1, node-N.2, and
    so on. They are recognized by what is written on them, at any of the paths, also while the
    service runs; an empty file system that is mounted at a path becomes a new disk.
    """
    if location_file is not None:
        zone, rack = read_location(location_file)
    config = storage_config(
        listen=listen,
        advertise=advertise,
        data=data,
        disks=disk or (),
        key_file=key_file,
        mgmtd=mgmtd,
        node_id=node_id or node_id_of(pod_name or os.uname().nodename),
        capacity_bytes=bytes_of(capacity),
        location=location_of(zone, rack, host),
        node_failure_ms=node_failure_ms,
        scrub_interval_hours=scrub_interval_hours,
        scrub_rate_bytes=bytes_of(scrub_rate),
    )
    config |= tls_config(enabled=tls, transition=tls_transition)
    _exit_on_sigterm()
    _serve("storage", config)


@app.command()
def locate(
    node_name: Annotated[str, typer.Option(envvar="NODE_NAME", help="Name of the node.")],
    location_file: Annotated[
        Path, typer.Option(envvar="THREEFS_LOCATION_FILE", help="File to write.")
    ],
    zone_label: Annotated[
        str, typer.Option(envvar="THREEFS_ZONE_LABEL", help="Label with the zone; empty: none.")
    ] = "",
    rack_label: Annotated[
        str, typer.Option(envvar="THREEFS_RACK_LABEL", help="Label with the rack; empty: none.")
    ] = "",
) -> None:
    """Write the zone and rack of a Kubernetes node for `threefs-service storage`."""
    from threefs.services.location import api_server, labels_of, write_location

    labels = labels_of(node_name, api_server(os.environ))
    write_location(location_file, labels, zone_label, rack_label)


@app.command()
def check(
    kind: Annotated[str, typer.Argument(help="mgmtd, meta or storage.")],
    key_file: KeyFile,
    mgmtd: Mgmtd = f"127.0.0.1:{MGMTD_PORT}",
    listen: Annotated[
        str, typer.Option(envvar="THREEFS_LISTEN", help="host:port of the service.")
    ] = "",
    node_id: Annotated[int, typer.Option(envvar="THREEFS_NODE_ID", help="As for storage.")] = 0,
    pod_name: Annotated[str, typer.Option(envvar="POD_NAME", help="As for storage.")] = "",
    ready: Annotated[bool, typer.Option("--ready", help="Check that it serves clients.")] = False,
    timeout: Annotated[float, typer.Option(help="Timeout in seconds.")] = 3.0,
    tls: Tls = False,
) -> None:
    """Exit 0 when the service of this pod is alive, or with --ready when it serves clients."""
    from threefs.services.probe import probe

    node = 0
    if kind == "storage":
        node = node_id or node_id_of(pod_name or os.uname().nodename)
    probe(kind, listen, key_file, mgmtd, node, ready=ready, timeout_seconds=timeout, tls=tls)


def _serve(kind: str, config: dict[str, object]) -> None:
    import json

    from threefs import _native

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _native.run_service(kind, json.dumps(config), 0)
    except (OSError, ValueError, RuntimeError) as error:
        _log(f"error: {error}")
        raise typer.Exit(1) from error


def _exit_on_sigterm() -> None:
    """A process with id 1 ignores SIGTERM unless it has a handler."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))


def _log(line: str) -> None:
    sys.stderr.write(f"threefs-service: {line}\n")
    sys.stderr.flush()


def main() -> None:
    """Entry point: an expected failure prints one line and sets the exit status."""
    try:
        app()
    except (InvalidArgument, ThreeFSError, OSError) as error:
        sys.exit(report_error(error))
