"""`threefs snapshot`: the commands and their options."""

from typing import Annotated

import typer

from threefs.cli.options import Cluster, Format, Timeout
from threefs.cli.output import Output

__all__ = ["snapshot_commands"]

snapshot_commands = typer.Typer(
    no_args_is_help=True,
    help="Snapshots of a volume (a directory with a quota), below VOLUME/.snapshots.",
)

Volume = Annotated[str, typer.Argument(help="Directory in 3FS with a quota.")]
Name = Annotated[str, typer.Argument(help="Name of the snapshot, a file name.")]


@snapshot_commands.command("create")
def snapshot_create(
    volume: Volume, name: Name, cluster: Cluster = None, timeout: Timeout = 30.0
) -> None:
    """Create a snapshot of a volume; its size does not matter.

    It has everything that was written before. VOLUME/.snapshots/NAME has its files, read-only.

    Example: threefs snapshot create /volumes/one before-training
    """
    from threefs.cli.snapshot import create

    create(cluster, volume, name, timeout)


@snapshot_commands.command("list")
def snapshot_list(
    volume: Volume,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 30.0,
) -> None:
    """List the snapshots of a volume, oldest first.

    Example: threefs snapshot list /volumes/one -o json
    """
    from threefs.cli.snapshot import list_snapshots

    list_snapshots(cluster, volume, output, timeout)


@snapshot_commands.command("remove")
def snapshot_remove(
    volume: Volume, name: Name, cluster: Cluster = None, timeout: Timeout = 30.0
) -> None:
    """Remove a snapshot; its space is freed in the background.

    Example: threefs snapshot remove /volumes/one before-training
    """
    from threefs.cli.snapshot import remove

    remove(cluster, volume, name, timeout)
