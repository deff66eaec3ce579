"""`threefs meta` and `threefs mgmtd`: backups of the two services' stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from threefs.cli.output import stdout_console
from threefs.errors import ThreeFSError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["backup_commands"]

WHAT = {
    "meta": "the metadata service: names, inodes, quotas",
    "mgmtd": "the cluster manager: nodes, chains and chain tables",
}
Store = Annotated[
    Path, typer.Option("--data", help="Folder of the store: the one with `data.mdb` in it.")
]


def backup_commands(kind: str) -> typer.Typer:
    """The commands for one kind of service."""
    commands = typer.Typer(
        name=kind, no_args_is_help=True, help=f"Back up and restore {WHAT[kind]}."
    )

    @commands.command()
    def dump(
        data: Store, file: Annotated[Path, typer.Option("--file", help="The dump to write.")]
    ) -> None:
        """Write a consistent snapshot of all rows into a file; the service may be running."""
        from threefs import _native

        _report("dumped", file, lambda: _native.store_dump(kind, str(data), str(file)))

    @commands.command()
    def load(
        data: Annotated[Path, typer.Option("--data", help="Folder of the new store, empty.")],
        file: Annotated[Path, typer.Option("--file", help="The dump to read.")],
    ) -> None:
        """Create the store of a stopped service from a dump, which is verified first."""
        from threefs import _native

        _report("loaded", file, lambda: _native.store_load(kind, str(data), str(file)))

    if kind == "meta":
        commands.command()(adopt)

    @commands.command()
    def verify(
        file: Annotated[Path, typer.Option("--file", help="The dump to read.")],
    ) -> None:
        """Read a dump to its end and check it."""
        from threefs import _native

        _report("verified", file, lambda: _native.store_verify(kind, str(file)))

    return commands


def adopt(
    data: Annotated[Path, typer.Option("--data", help="Folder of the store; may be empty.")],
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Accept the loss of all files that are not in this store."),
    ] = False,
) -> None:
    """Let a stopped service's store replace the one that its cluster has registered.

    For metadata that is lost without a dump. Files that the store does not contain are lost; their
    chunks stay on the disks. New files get inode numbers that the lost metadata cannot have used.
    """
    from threefs import _native

    if not yes:
        reason = "all files that this store does not contain will be lost"
        raise ThreeFSError(f"nothing was changed: {reason}; to accept this, add --yes")
    try:
        _native.store_adopt(str(data))
    except OSError as error:
        raise ThreeFSError(str(error)) from error
    stdout_console().print(
        f"{data} replaces the metadata of its cluster at the next start of the service"
    )


def _report(action: str, file: Path, work: Callable[[], tuple[int, int]]) -> None:
    try:
        rows, size = work()
    except OSError as error:
        raise ThreeFSError(str(error)) from error
    stdout_console().print(f"{action} {rows} rows, {size} bytes: {file}")
