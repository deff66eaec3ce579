"""`threefs trash`: the commands and their options."""

from typing import Annotated

import typer

from threefs.cli.options import Cluster, Format, Timeout
from threefs.cli.output import Output
from threefs.exit_status import EXIT_FAILED

__all__ = ["trash_commands"]

trash_commands = typer.Typer(
    no_args_is_help=True,
    help="Removed files of a volume (a directory with a quota), which can be restored for a time.",
)

Volume = Annotated[str, typer.Argument(help="Directory in 3FS with a quota.")]
Paths = Annotated[
    list[str] | None, typer.Argument(help="Paths below the volume; with all that is below them.")
]
Id = Annotated[str | None, typer.Option("--id", help="One entry, as listed.")]


@trash_commands.command("keep")
def trash_keep(
    volume: Volume,
    duration: Annotated[
        str, typer.Argument(help="90s, 30m, 12h, 7d; `off`: remove at once, also what is kept.")
    ],
    cluster: Cluster = None,
    timeout: Timeout = 30.0,
) -> None:
    """Set how long removed files of a volume are kept. Needs the cluster's key.

    They stay charged to the volume's quota until they expire or are purged.

    Examples: threefs trash keep /volumes/one 7d ; threefs trash keep /volumes/one off
    """
    from threefs.cli.trash import keep

    keep(cluster, volume, duration, timeout)


@trash_commands.command("list")
def trash_list(
    volume: Volume,
    paths: Paths = None,
    limit: Annotated[int, typer.Option(help="Entries to show at most.", min=1)] = 1000,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 30.0,
) -> None:
    """List what was removed from a volume, oldest first.

    Examples: threefs trash list /volumes/one ; threefs trash list /volumes/one data/run-7 -o json
    """
    from threefs.cli.trash import list_trash

    list_trash(cluster, volume, output, timeout, under=paths or [], limit=limit)


@trash_commands.command("restore")
def trash_restore(
    volume: Volume,
    paths: Paths = None,
    entry: Id = None,
    to: Annotated[
        str | None, typer.Option(help="With --id, another path for it, from the root of 3FS.")
    ] = None,
    cluster: Cluster = None,
    timeout: Timeout = 30.0,
) -> None:
    """Restore what was removed: of each path the newest entry, or the one with this id.

    Removed directories above it are restored, too. Nothing that exists is replaced. Exit status: 1
    if an entry could not be restored.

    Examples: threefs trash restore /volumes/one data/run-7 ;
    threefs trash restore /volumes/one --id 1764369601123-4711 --to /volumes/one/data/old.bin
    """
    from threefs.cli.trash import restore

    if not restore(cluster, volume, timeout, paths=paths or [], entry=entry, to=to):
        raise typer.Exit(EXIT_FAILED)


@trash_commands.command("purge")
def trash_purge(
    volume: Volume,
    paths: Paths = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
    older_than: Annotated[
        str | None, typer.Option(help="Entries removed longer ago: 90s, 30m, 12h, 7d.")
    ] = None,
    entry: Id = None,
    cluster: Cluster = None,
    timeout: Timeout = 30.0,
) -> None:
    """Remove entries for good, for example when the quota of the volume is full.

    Examples: threefs trash purge /volumes/one --all ;
    threefs trash purge /volumes/one --older-than 1d ; threefs trash purge /volumes/one data/tmp
    """
    from threefs.cli.trash import purge

    purge(
        cluster,
        volume,
        timeout,
        paths=paths or [],
        everything=everything,
        older_than=older_than,
        entry=entry,
    )
