"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from threefs.cli.output import Output

__all__ = ["Cluster", "Format", "Timeout"]

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
Timeout = Annotated[
    float, typer.Option(help="Seconds that one operation may wait for services.", min=0.1)
]
