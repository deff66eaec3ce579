"""Options that verbs share. Reading them here keeps every verb's signature to what is its own."""

from __future__ import annotations

from typing import Annotated

import typer

from flyer.cli.output import Output

__all__ = ["JobName", "OutputFormat", "Reason", "output_wanted"]

_wanted = Output.TABLE


def _remember(value: Output) -> Output:
    global _wanted  # noqa: PLW0603 - one command line a process; errors are printed in its format
    _wanted = value
    return value


def output_wanted() -> Output:
    """What -o said, for whoever prints an error."""
    return _wanted


JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name, or namespace/name.")]
OutputFormat = Annotated[
    Output, typer.Option("-o", "--output", help="What to print.", callback=_remember)
]
Reason = Annotated[str, typer.Option("--reason", help="Why, for others to read.")]
