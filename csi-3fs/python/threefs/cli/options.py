"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from threefs.cli.output import Output

__all__ = ["Cluster", "Format"]

Cluster = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        "-c",
        envvar="THREEFS_CLUSTER",
        help="cluster.json of the cluster, or its folder.",
    ),
]
Format = Annotated[Output, typer.Option("--output", "-o", help="table or json.")]
