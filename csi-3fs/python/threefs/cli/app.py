"""The commands and their options; each calls one function of a sibling module."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from threefs.cli.backup import backup_commands
from threefs.cli.credential_commands import credential_commands
from threefs.cli.doctor import doctor
from threefs.cli.fsck import fsck
from threefs.cli.options import Cluster, Format, Timeout
from threefs.cli.output import Output, bytes_of
from threefs.cli.snapshot_commands import snapshot_commands
from threefs.cli.top import top
from threefs.cli.trash_commands import trash_commands
from threefs.errors import ThreeFSError
from threefs.etcd import DEFAULT_PREFIX, EtcdOptions, Metadata
from threefs.exit_status import EXIT_INTERRUPTED, report_error
from threefs.postgres import DEFAULT_SCHEMA, PostgresOptions

__all__ = ["app", "main"]

app = typer.Typer(
    name="threefs",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="3FS: a CRAQ file system. Start one with `threefs serve`, then point THREEFS_CLUSTER at "
    "its cluster.json.",
)

app.command()(doctor)
app.command()(fsck)
app.command()(top)
app.add_typer(backup_commands("meta"))
app.add_typer(backup_commands("mgmtd"))
app.add_typer(credential_commands, name="credential")
app.add_typer(trash_commands, name="trash")
app.add_typer(snapshot_commands, name="snapshot")

DEFAULT_STATE = Path("/run/threefs/mounts")
State = Annotated[
    Path,
    typer.Option(envvar="THREEFS_MOUNTS", help="State folder of the mounts of this machine."),
]


@app.command()
def serve(
    data: Annotated[Path, typer.Option(help="Folder for everything: data, key, logs.")],
    storage: Annotated[int, typer.Option(help="Storage processes.")] = 3,
    disks: Annotated[int, typer.Option(help="Disks of a storage process, which are folders.")] = 1,
    mgmtds: Annotated[
        int, typer.Option(help="Cluster managers; more than one needs a shared store.")
    ] = 1,
    metas: Annotated[
        int, typer.Option(help="Metadata services; more than one needs a shared store.")
    ] = 1,
    replicas: Annotated[int, typer.Option(help="Copies of every chunk.")] = 3,
    chains_per_node: Annotated[
        int, typer.Option(help="Chains per disk, counted by their heads.")
    ] = 1,
    chunk_size: Annotated[str, typer.Option(help="Bytes of a file chunk.")] = "1M",
    capacity: Annotated[str, typer.Option(help="Bytes of a disk; 0: its file system.")] = "0",
    restart_after: Annotated[float, typer.Option(help="Seconds before a restart.")] = 1.0,
    ready_timeout: Annotated[float, typer.Option(help="Time limit for the start.")] = 30.0,
    node_failure_ms: Annotated[
        int, typer.Option(help="Milliseconds of silence after which a node is dead.")
    ] = 1000,
    tls: Annotated[bool, typer.Option("--tls", help="TLS for all connections.")] = False,
    metadata: Annotated[
        Metadata,
        typer.Option(help="Store of the metadata: a folder, or three etcd members that run here."),
    ] = Metadata.EMBEDDED,
    convert: Annotated[
        bool, typer.Option("--convert", help="Convert a folder to the given --metadata first.")
    ] = False,
    etcd_binary: Annotated[
        Path | None,
        typer.Option(help="Program of the members, 3.5 or newer. Default: etcd on the PATH."),
    ] = None,
    etcd_endpoints: Annotated[
        str,
        typer.Option(help="http://host:port of members that others run, with commas."),
    ] = "",
    etcd_prefix: Annotated[
        str, typer.Option(help="Prefix of this cluster's keys in etcd.")
    ] = DEFAULT_PREFIX,
    etcd_accept_restored: Annotated[
        bool,
        typer.Option("--etcd-accept-restored", help="Accept once that etcd lost later changes."),
    ] = False,
    postgres_url: Annotated[
        str,
        typer.Option(help="postgresql://USER@HOST:PORT/DATABASE for the metadata."),
    ] = "",
    postgres_schema: Annotated[
        str, typer.Option(help="Start of the names of this cluster's schemas.")
    ] = DEFAULT_SCHEMA,
    postgres_password_file: Annotated[
        Path | None, typer.Option(help="File with the password of PostgreSQL's user.")
    ] = None,
    postgres_require_standby: Annotated[
        bool, typer.Option(help="Refuse a server without a synchronous standby.")
    ] = True,
    postgres_accept_restored: Annotated[
        bool,
        typer.Option("--postgres-accept-restored", help="Accept once that it lost later changes."),
    ] = False,
) -> None:
    """Run a whole cluster on this machine until Ctrl-C.

    With --metadata etcd, any mgmtd, meta or member may die while clients continue. The members
    listen on 127.0.0.1 and accept only the certificate in the folder.

    Examples: threefs serve --data /tmp/3fs --storage 3 --replicas 3 ;
    threefs serve --data /tmp/3fs --mgmtds 2 --metas 2 --metadata etcd ;
    threefs serve --data /tmp/3fs --mgmtds 2 --metas 2
    --etcd-endpoints http://10.0.0.1:2379,http://10.0.0.2:2379,http://10.0.0.3:2379
    """
    from threefs.supervisor import ServeOptions, Supervisor

    options = ServeOptions(
        data=data,
        storage=storage,
        disks=disks,
        mgmtds=mgmtds,
        metas=metas,
        replicas=replicas,
        chains_per_node=chains_per_node,
        chunk_bytes=bytes_of(chunk_size),
        capacity_bytes=bytes_of(capacity),
        restart_after_seconds=restart_after,
        ready_timeout_seconds=ready_timeout,
        node_failure_ms=node_failure_ms,
        tls=tls,
        metadata=metadata,
        convert=convert,
        etcd_binary=etcd_binary,
        etcd=EtcdOptions(etcd_endpoints, etcd_prefix, accept_restored=etcd_accept_restored),
        postgres=PostgresOptions(
            postgres_url,
            postgres_schema,
            password_file=postgres_password_file,
            require_standby=postgres_require_standby,
            accept_restored=postgres_accept_restored,
        ),
    )

    def on_ready(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def log(line: str) -> None:
        sys.stderr.write(f"threefs: {line}\n")
        sys.stderr.flush()

    Supervisor(options, log).run(on_ready)


@app.command()
def status(
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 5.0,
) -> None:
    """Show every service, chains with the states of their targets, and capacity.

    The exit status is 1 when a chain has no target that serves.

    Example: threefs status -o json
    """
    from threefs.cli.status import show_status

    show_status(cluster, output, timeout)


@app.command()
def rebalance(
    apply: Annotated[bool, typer.Option("--apply", help="Start the moves.")] = False,
    rate: Annotated[
        str | None,
        typer.Option(help="Limit of the bytes per second that moves copy, stored; 0: none."),
    ] = None,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 10.0,
) -> None:
    """Show the moves that balance all storage nodes; --apply starts them.

    A replica is copied before the old one is removed, two at a time, and data stays readable. mgmtd
    starts this on its own when nodes are added, unless it runs with --no-rebalance. Nodes get
    replicas in proportion to their capacity, and no zone, rack or host gets more replicas of a
    chain than necessary. --rate limits the mean over several moves, and not the copies that
    restore a lost replica. The exit status is 0 even if no move is needed.

    Examples: threefs rebalance --apply ; threefs rebalance --rate 200M
    """
    from threefs.cli.rebalance import show_rebalance

    bytes_per_second = None if rate is None else bytes_of(rate)
    show_rebalance(cluster, output, timeout, apply=apply, bytes_per_second=bytes_per_second)


@app.command()
def drain(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(help="Nodes (node-3.2), or a service, host, rack or zone with its nodes."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Start the moves, and wait.")] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Keep these nodes, or all if none is given.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="With --apply, wait until they are empty.")
    ] = True,
    stalled_seconds: Annotated[
        float, typer.Option(help="End the wait after this time without progress.", min=1.0)
    ] = 600.0,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 10.0,
) -> None:
    """Empty storage nodes, which can then be removed; --apply starts it.

    A node is one disk: node-3.2 is disk 2 of storage service 3, node-3 its first disk, and
    service-3 denotes all disks of the service.

    Data stays readable, and no chain has fewer replicas meanwhile. A replica for which no other
    node may be used stays, and is reported. Drained nodes get no replicas until --cancel, and
    drains of several nodes add up. The wait shows what moves wait for, and ends without progress
    after --stalled-seconds. It and Ctrl-C do not end the drain. Exit status: 1 if the nodes are
    not empty after the wait.

    Examples: threefs drain node-4.1 --apply ; threefs drain --cancel host-7 --apply
    """
    from threefs.cli.drain import Drain, drain_nodes

    request = Drain(apply=apply, cancel=cancel, wait=wait, stalled_seconds=stalled_seconds)
    drain_nodes(cluster, output, timeout, nodes or [], request)


@app.command()
def scrub(
    now: Annotated[
        bool, typer.Option("--now", help="Start a pass on each target, unless one is running.")
    ] = False,
    target: Annotated[
        list[int] | None, typer.Option(help="Number of a target; repeatable. Default: all.")
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the running passes to end.", min=0.0)
    ] = 0.0,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 10.0,
) -> None:
    """Show the scrubs, which read all stored chunks and repair damaged ones; --now starts them.

    Storage services scrub each target once a week. The exit status is 1 when chunks are damaged on
    all replicas or differ, or a target does not answer; 106 when --wait ends before the passes.

    Examples: threefs scrub ; threefs scrub --now --wait 3600
    """
    from threefs.cli.scrub import show_scrub

    show_scrub(cluster, output, timeout, start=now, targets=target or [], wait_seconds=wait)


@app.command()
def promote(
    target: Annotated[
        int, typer.Argument(help="Number of the target, as shown by `threefs status`.")
    ],
    apply: Annotated[
        bool, typer.Option("--apply", help="Promote; otherwise only show the consequences.")
    ] = False,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 10.0,
) -> None:
    """Let a target lead its chain when all replicas that served last are lost.

    Every write that the chain acknowledged after this target had stopped serving is lost. A target
    whose store is empty is refused. The exit status is 2 when the target cannot be promoted.

    Example: threefs promote 1048577 ; threefs promote 1048577 --apply
    """
    from threefs.cli.promote import show_promotion

    show_promotion(cluster, output, timeout, target=target, apply=apply)


@app.command()
def ls(
    path: Annotated[str, typer.Argument(help="A path in 3FS.")] = "/",
    long: Annotated[bool, typer.Option("--long", "-l", help="Kind, mode, size, time.")] = False,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 30.0,
) -> None:
    """List a directory, or show one file.

    Example: threefs ls -l /data
    """
    from threefs.cli.files import list_path

    list_path(cluster, path, timeout, output=output, long=long)


@app.command()
def cp(
    sources: Annotated[list[str], typer.Argument(help="Sources: PATH or 3fs:/PATH.")],
    destination: Annotated[str, typer.Argument(help="Destination: PATH or 3fs:/PATH.")],
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Copy folders.")] = False,
    cluster: Cluster = None,
    timeout: Timeout = 30.0,
) -> None:
    """Copy files in or out; paths in 3FS start with 3fs:/.

    Examples: threefs cp model.bin 3fs:/models/ ; threefs cp -r 3fs:/data ./data
    """
    from threefs.cli.copy import copy

    copy(cluster, sources, destination, timeout, recursive=recursive)


@app.command()
def cat(
    paths: Annotated[list[str], typer.Argument(help="Files in 3FS.")],
    cluster: Cluster = None,
    timeout: Timeout = 30.0,
) -> None:
    """Write files to standard output.

    Example: threefs cat /data/readme.txt | head
    """
    from threefs.cli.files import cat_files

    cat_files(cluster, paths, timeout)


@app.command()
def mount(
    path: Annotated[Path, typer.Argument(help="Directory to mount at; created if it is missing.")],
    root: Annotated[str, typer.Option(help="Directory in 3FS to mount.")] = "/",
    read_only: Annotated[bool, typer.Option("--read-only", help="Mount read-only.")] = False,
    foreground: Annotated[
        bool,
        typer.Option("--foreground", "-f", help="Stay in the foreground; Ctrl-C unmounts."),
    ] = False,
    state: State = DEFAULT_STATE,
    cluster: Cluster = None,
) -> None:
    """Mount a directory of 3FS on this machine. Needs root.

    A mount manager keeps the mount in the background and replaces its FUSE daemon if it dies.
    Its log is `manager.log` in the state folder.

    Example: threefs mount --cluster /tmp/3fs --root /data /mnt/3fs
    """
    from threefs.cli.mount import mount_path

    mount_path(cluster, path, root, state, read_only=read_only, foreground=foreground)


@app.command()
def umount(
    path: Annotated[Path, typer.Argument(help="Directory that `threefs mount` mounted.")],
    force: Annotated[
        bool,
        typer.Option("--force", help="Detach a busy mount: programs that use it get errors."),
    ] = False,
    state: State = DEFAULT_STATE,
) -> None:
    """Unmount a directory that `threefs mount` mounted, and stop its mount manager.

    Example: threefs umount /mnt/3fs
    """
    from threefs.cli.mount import umount_path

    umount_path(path, state, force=force)


@app.command()
def fuse(
    fd: Annotated[int, typer.Option(help="Descriptor of /dev/fuse, already mounted.")],
    root: Annotated[str, typer.Option(help="Directory in 3FS that is the mount's root.")] = "/",
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse every change.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue where another daemon of this mount ended.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(help="State file for the next daemon; default: in /run/threefs."),
    ] = None,
    write_back: Annotated[
        bool,
        typer.Option(
            "--write-back",
            help="Let the kernel cache writes and write them back later; fsync and close still "
            "wait. Only if no other machine uses the directory.",
        ),
    ] = False,
    claim_for: Annotated[
        str,
        typer.Option(
            help="This node's name, if only one node may use the directory above the root: "
            "nothing is served while another has it."
        ),
    ] = "",
    claim_seconds: Annotated[
        float, typer.Option(help="Seconds for which a renewal of that claim is valid.", min=0.5)
    ] = 20.0,
    user: Annotated[
        int,
        typer.Option(
            help="Continue as this user and group, without capabilities and with at most 1 GiB of "
            "memory. It must be able to read the cluster file and the key or ticket, and to write "
            "the state file. Default: the caller's user."
        ),
    ] = 0,
    cluster: Cluster = None,
    timeout: Timeout = 30.0,
) -> None:
    """Serve a mount whose descriptor the caller opened, mounted and keeps.

    Writes one line of JSON when it serves. Exits when the mount is removed, or on SIGTERM. Reads
    prefer replicas near the machine: THREEFS_ZONE, THREEFS_RACK and THREEFS_HOST as for storage
    services.

    Example: threefs fuse --root /volumes/one --fd 3
    """
    from threefs.cluster import ClusterFile
    from threefs.confine import confine
    from threefs.daemon import run_daemon
    from threefs.errors import InvalidArgument
    from threefs.location import own_location

    if cluster is None:
        raise InvalidArgument("no cluster given: pass --cluster FILE or set THREEFS_CLUSTER")
    location = own_location(os.environ)
    if user:
        confine(user)
    run_daemon(
        ClusterFile.read(cluster),
        root,
        fd,
        resume=resume,
        state=state,
        read_only=read_only,
        timeout_seconds=timeout,
        write_back=write_back,
        claim_for=claim_for,
        claim_seconds=claim_seconds,
        location=location,
    )


@app.command()
def bench(
    size: Annotated[str, typer.Option(help="Bytes to write and read.")] = "256M",
    batch: Annotated[str, typer.Option(help="Bytes of one batch.")] = "64M",
    raw: Annotated[
        Path | None,
        typer.Option(help="Folder on the cluster's disk: also measure it, and show the ratio."),
    ] = None,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 60.0,
) -> None:
    """Measure durable batch writes and batch reads.

    Example: threefs bench --size 1G --raw /tmp/3fs
    """
    from threefs.cli.bench import run_bench

    run_bench(cluster, bytes_of(size), bytes_of(batch), raw, output, timeout)


def main() -> None:
    """Entry point: an expected failure prints one line, without traceback, and sets the status."""
    try:
        app()
    except (ThreeFSError, OSError) as error:
        sys.exit(report_error(error))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
