"""`threefs meta` and `threefs mgmtd`: backup and conversion of the two services' stores."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from threefs.cli import backup_folder
from threefs.cli.options import Format
from threefs.cli.output import Output, print_json, stderr_console, stdout_console
from threefs.cli.rekey import rekey_command
from threefs.cli.shared_store import with_shared_store
from threefs.cli.store import Data, Report, progress, store_json
from threefs.errors import ThreeFSError
from threefs.shared_store import NO_SHARED_STORE, SharedStore

__all__ = ["backup_commands"]

WHAT = {
    "meta": "the metadata service: names, inodes, quotas",
    "mgmtd": "the cluster manager: nodes, chains and chain tables",
}
HELP = """Back up, restore and convert {what}.

Examples:

threefs {kind} dump --data /data/{kind} --file {kind}.dump

threefs {kind} verify --file {kind}.dump

threefs {kind} load --etcd-endpoints http://etcd-0:2379 --file {kind}.dump

threefs {kind} load --postgres-url postgresql://threefs@pg-0:5432/threefs --file {kind}.dump
"""
NewData = Annotated[Path | None, typer.Option(help="Folder of a new embedded store, empty.")]
Output_ = Annotated[Path, typer.Option("--file", help="The dump to write.")]
Input = Annotated[Path, typer.Option("--file", help="The dump to read.")]


def backup_commands(kind: str) -> typer.Typer:
    """The commands for one kind of service."""
    commands = typer.Typer(
        name=kind, no_args_is_help=True, help=HELP.format(kind=kind, what=WHAT[kind])
    )

    @commands.command()
    @with_shared_store
    def dump(
        file: Output_,
        data: Data = None,
        force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
        output: Format = Output.TABLE,
        shared: SharedStore = NO_SHARED_STORE,
    ) -> None:
        """Write a consistent snapshot of all rows into a file; the service may be running."""
        from threefs import _native

        store = store_json(kind, data, shared)
        if file.exists() and not force:
            raise ThreeFSError(f"`{file}` exists; name another file, or replace it with --force")
        _run(
            "dumped",
            file,
            output,
            lambda report: (*_native.store_dump(kind, store, file, report), file),
        )

    @commands.command()
    @with_shared_store
    def backup(
        folder: Annotated[Path, typer.Option(help="Folder of the backups.")],
        keep: Annotated[int, typer.Option(min=1, help="Number of backups to keep.")] = 7,
        data: Data = None,
        output: Format = Output.TABLE,
        shared: SharedStore = NO_SHARED_STORE,
    ) -> None:
        """Write a dump into a folder, verify it, then remove the oldest ones.

        For periodic jobs. The file is named after the service, the cluster and the time; only files
        of the same service and cluster are removed. If the dump fails or is damaged, none is.
        """
        from threefs import _native

        store = store_json(kind, data, shared)
        ignored: list[str] = []

        def dump_and_verify(report: Report) -> tuple[int, int, Path]:
            backup_folder.remove_abandoned_drafts(folder, kind)
            with backup_folder.draft(folder, kind) as draft:
                dumped = _native.store_dump(kind, store, draft, report)
                *verified, cluster = _native.store_verify(kind, draft, report)
                if tuple(verified) != dumped:
                    raise OSError(f"`{draft}` differs from what was dumped; check its file system")
                if cluster is None:
                    raise OSError(
                        "the store has no cluster yet, so its backups cannot be named; start its "
                        "service once, or use `dump`"
                    )
                file = backup_folder.publish(draft, kind, cluster)
            ignored.extend(backup_folder.rotate(file, kind, cluster, keep))
            return *dumped, file

        _run("dumped and verified", folder, output, dump_and_verify)
        if ignored:
            stderr_console().print(
                f"warning: {', '.join(ignored)} in {folder}: the time is later than now, so it is "
                "neither counted nor removed; check the clock, and remove it",
                soft_wrap=True,
            )

    @commands.command()
    @with_shared_store
    def load(
        file: Input,
        data: NewData = None,
        output: Format = Output.TABLE,
        shared: SharedStore = NO_SHARED_STORE,
    ) -> None:
        """Fill the empty store of a stopped service from a dump, which is verified first.

        The store may be of another kind than the dumped one. A service refuses the store of a load
        that was interrupted; repeat the load.
        """
        from threefs import _native

        store = store_json(kind, data, shared)
        _run(
            "loaded",
            file,
            output,
            lambda report: (*_native.store_load(kind, store, file, report), file),
        )

    commands.command()(with_shared_store(rekey_command(kind)))
    if kind == "meta":
        commands.command()(with_shared_store(adopt))

    @commands.command()
    def verify(file: Input, output: Format = Output.TABLE) -> None:
        """Read a dump to its end and check it."""
        from threefs import _native

        _run(
            "verified",
            file,
            output,
            lambda report: (*_native.store_verify(kind, file, report)[:2], file),
        )

    return commands


def adopt(
    data: Annotated[Path | None, typer.Option(help="Folder of the store; may be empty.")] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Accept the loss of all files that are not in this store."),
    ] = False,
    shared: SharedStore = NO_SHARED_STORE,
) -> None:
    """Let a stopped service's store replace the one that its cluster has registered.

    For metadata that is lost without a dump. Files that the store does not contain are lost; their
    chunks stay on the disks. New files get inode numbers that the lost metadata cannot have used.
    """
    from threefs import _native

    store = store_json("meta", data, shared)
    if not yes:
        reason = "all files that this store does not contain will be lost"
        raise ThreeFSError(f"nothing was changed: {reason}; to accept this, add --yes")
    try:
        _native.store_adopt(store)
    except OSError as error:
        raise ThreeFSError(str(error)) from error
    stdout_console().print(
        f"{data or shared.address} replaces the metadata of its cluster at the next start of the "
        "service"
    )


def _run(
    action: str, source: Path, output: Output, work: Callable[[Report], tuple[int, int, Path]]
) -> None:
    with progress(source.name) as report:
        try:
            rows, size, file = work(report)
        except OSError as error:
            raise ThreeFSError(str(error)) from error
    if output is Output.JSON:
        print_json({"file": str(file), "rows": rows, "bytes": size})
    else:
        stdout_console().print(f"{action} {rows} rows, {size} bytes: {file}")
