"""Options that verbs share. Reading them here keeps every verb's signature to what is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flyer.cli.output import Output

__all__ = ["JobName", "Namespace", "OutputFormat", "Reason", "State", "key_of", "output_wanted"]

_wanted = Output.TABLE


def _remember(value: Output) -> Output:
    global _wanted  # noqa: PLW0603 - one command line a process; errors are printed in its format
    _wanted = value
    return value


def output_wanted() -> Output:
    """What -o said, for whoever prints an error."""
    return _wanted


def key_of(name: str, namespace: str) -> str:
    """`namespace/name`; a name may bring its own namespace."""
    return name if "/" in name else f"{namespace}/{name}"


JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name, or namespace/name.")]
State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        envvar="FLYER_STATE",
        help="The cluster's state directory (default: the one in .flyer/).",
    ),
]
Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Namespace of the job.")]
OutputFormat = Annotated[
    Output, typer.Option("-o", "--output", help="What to print.", callback=_remember)
]
Reason = Annotated[str, typer.Option("--reason", help="Why, for others to read.")]
