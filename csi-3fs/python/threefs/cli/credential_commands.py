"""`threefs credential`: the commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

from threefs.cli.options import Cluster, Format
from threefs.cli.output import Output

__all__ = ["credential_commands"]

credential_commands = typer.Typer(
    no_args_is_help=True, help="Credentials for one directory, used in place of the key."
)


@credential_commands.command("issue")
def credential_issue(
    volume: Annotated[str, typer.Option(help="Directory in 3FS; it must have a quota.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="Allow no changes.")] = False,
    expires: Annotated[str, typer.Option(help="How long it is valid: 90s, 30m, 1h, 7d.")] = "1h",
    node: Annotated[str, typer.Option(help="Name of the node that uses it, for logs.")] = "",
    to: Annotated[
        Path | None, typer.Option(help="File to write, with mode 0600. Default: standard output.")
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Issue a credential for one directory. Needs the cluster's key.

    To use it, set its file as `key_file` of a cluster.json. Replace the file before the credential
    expires; its holders reload it.

    Example: threefs credential issue --volume /volumes/one --expires 1h --to one.ticket
    """
    from threefs.cli.credential import issue
    from threefs.errors import InvalidArgument

    if cluster is None:
        raise InvalidArgument("no cluster given: pass --cluster FILE or set THREEFS_CLUSTER")
    issue(cluster, volume, read_only=read_only, expires=expires, node=node, to=to)


@credential_commands.command("show")
def credential_show(
    file: Annotated[Path, typer.Argument(help="File of a credential.")],
    output: Format = Output.TABLE,
) -> None:
    """Show what a credential allows and when it expires, without its secret.

    Example: threefs credential show one.ticket
    """
    from threefs.cli.credential import show

    show(file, output)
