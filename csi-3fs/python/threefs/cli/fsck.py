"""`threefs fsck`: checks the metadata of a cluster against itself, or its chunks against it."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from threefs.cli.fsck_chunks import check_chunks
from threefs.cli.fsck_repair import repair_counters
from threefs.cli.options import Cluster, Format
from threefs.cli.output import Output, print_json
from threefs.cli.shared_store import with_shared_store
from threefs.cli.store import Data, progress, store_json
from threefs.errors import InvalidArgument, ThreeFSError
from threefs.exit_status import EXIT_FAILED
from threefs.shared_store import NO_SHARED_STORE, SHARED_STORES, SharedStore

__all__ = ["fsck"]


@with_shared_store
def fsck(
    data: Data = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A dump to check, instead of a store.")
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the dump of a store, as large as its rows. Default: $TMPDIR."
        ),
    ] = None,
    chunks: Annotated[
        bool,
        typer.Option("--chunks", help="Check the chunks of a running cluster against it instead."),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Correct counters of the running cluster --cluster, whose store is read; with "
            "--chunks: remove chunks that are leaked.",
        ),
    ] = False,
    grace: Annotated[
        float,
        typer.Option(help="Seconds after which --repair looks leaked inodes up again.", min=0),
    ] = 60.0,
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    shared: SharedStore = NO_SHARED_STORE,
) -> None:
    """Check metadata against itself, or with --chunks all chunks against it.

    Metadata: names, inodes, links, quotas, queues, trash. All rows are of one moment, so the
    services may be running, and every finding is a fault. Memory: about 600 bytes for each inode.
    --repair corrects counters (usage of quotas, links, subdirectories, answers) while the cluster
    is used, and checks again. Exit status: 1 if something is wrong, or stays wrong.

    Chunks: those whose inode does not exist (leaked), and those of files that were written and do
    not exist (missing; holes are not). Contents are not read: `threefs scrub` checks those. The
    cluster may be used meanwhile: --repair removes only chunks of inodes that can never exist
    again. Exit status: 1 if something is missing, leaked and not removed, or was not read.

    Examples: threefs fsck --data /data/meta ; threefs fsck --file meta.dump -o json ;
    threefs fsck --etcd-endpoints http://etcd-0:2379 ; threefs fsck --chunks --repair ;
    threefs fsck --data /data/meta --repair --cluster cluster.json
    """
    if chunks:
        if file is not None or data is not None:
            raise InvalidArgument("--chunks checks a running cluster: pass --cluster, not a store")
        check_chunks(cluster, output, repair=repair, grace_seconds=grace)
        return
    if repair and file is not None:
        raise InvalidArgument("--repair corrects a running cluster: pass its store, not --file")
    if file is not None:
        if data is not None or shared.config("meta") is not None:
            raise InvalidArgument(f"pass --file, or a store with --data, {SHARED_STORES}")
        checked = _check(file)
    else:
        store = store_json("meta", data, shared)
        if repair:
            checked = repair_counters(cluster, lambda: _check_store(store, scratch))
        else:
            checked = _check_store(store, scratch)
    del checked["repair"]
    checked["correctable"] = len(checked.pop("corrections"))
    if output is Output.JSON:
        print_json(checked)
    else:
        _show(checked)
    if checked["findings_total"]:
        raise typer.Exit(EXIT_FAILED)


def _check_store(store: str, scratch: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="threefs-fsck-", dir=scratch) as folder:
        return _check(_dump(store, Path(folder)))


def _dump(store: str, folder: Path) -> Path:
    from threefs import _native

    dump = folder / "meta.dump"
    with progress("read") as report:
        try:
            _native.store_dump("meta", store, dump, report)
        except OSError as error:
            raise ThreeFSError(str(error)) from error
    return dump


def _check(dump: Path) -> dict[str, Any]:
    from threefs import _native

    with progress("check") as report:
        try:
            checked: dict[str, Any] = json.loads(_native.store_check(dump, report))
        except OSError as error:
            raise ThreeFSError(str(error)) from error
    return checked


def _show(checked: dict[str, Any]) -> None:
    for finding in checked["findings"]:
        typer.echo(f"{finding['kind']}: inode {finding['inode']} {finding['detail']}")
    if more := checked["findings_total"] - len(checked["findings"]):
        typer.echo(f"and {more} more")
    if repaired := checked.get("corrected"):
        typer.echo(f"{repaired} counters were corrected")
    if checked["unreadable_rows"]:
        typer.echo(
            f"counters cannot be corrected: {checked['unreadable_rows']} rows are unreadable"
        )
    elif checked["correctable"]:
        typer.echo(f"correct {checked['correctable']} counters with `threefs fsck --repair`")
    result = f"{checked['findings_total']} findings" if checked["findings"] else "consistent"
    typer.echo(f"{checked['rows']} rows, {checked['inodes']} inodes: {result}")
