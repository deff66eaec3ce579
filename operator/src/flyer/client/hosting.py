"""Hosts the driver of a local cluster in this process, for `flyer run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flyer.errors import ExitStatus, FlyerError
from flyer.local.cluster import LocalCluster, load_cluster
from flyer.local.state_directory import STATES_FOLDER, StatePaths, driver_alive, find_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flyer.local.driver import Driver

__all__ = [
    "LocalCluster", "Manifest", "StatePaths", "driver_alive", "find_cluster", "has_state",
    "host_driver", "read_manifest",
]  # fmt: skip


class Manifest(NamedTuple):
    """A manifest that was read and validated."""

    path: Path
    text: str

    @property
    def folder(self) -> Path:
        """The folder to which relative paths of its template refer."""
        return self.path.absolute().parent


def has_state() -> bool:
    """Whether a local cluster is found from the environment or the current folder."""
    try:
        find_state()
    except FlyerError as error:
        return error.code != "Unreachable"  # several clusters: --state selects one
    return True


def read_manifest(path: Path) -> Manifest:
    """Read a manifest and validate its jobs. Raises FlyerError (usage)."""
    from flyer.local import submit

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FlyerError.usage(
            f"cannot read the manifest `{path}`: {reason}", "give the path of a FlyerJob"
        ) from error
    submit.read_manifest(text, str(path))
    return Manifest(path, text)


def find_cluster(file: Path | None, state: Path | None) -> tuple[StatePaths, LocalCluster | None]:
    """The state directory, and the cluster if its file is given."""
    cluster = load_cluster(file) if file else None
    if state is not None:
        return StatePaths(state.expanduser().absolute()), cluster
    if cluster is not None:
        return StatePaths((Path.cwd() / STATES_FOLDER / cluster.name).absolute()), cluster
    try:
        return find_state(), None
    except FlyerError as error:
        if error.exit_status != ExitStatus.UNREACHABLE:
            raise
        raise FlyerError.usage(
            "no cluster found",
            "create one: flyer run JOB.yaml --cluster examples/clusters/two-zones.yaml",
        ) from error


def host_driver(
    paths: StatePaths,
    cluster: LocalCluster | None,
    manifest: Manifest | None,
    *,
    preload: Sequence[str],
    keep: bool,
    opened: Callable[[list[str]], None],
    ready: Callable[[], None],
) -> int:
    """Drive a cluster until every job has ended; returns the number of the ending signal, or 0.

    Without `cluster` it is the stored one. `opened` gets the keys of the jobs of the manifest, or
    of all unfinished ones; `ready` is called once clients can connect.
    """
    from flyer.local import submit
    from flyer.local.session import drive

    if cluster is None:
        if not paths.cluster.exists():
            raise FlyerError.usage(f"`{paths.root}` has no cluster", "give its file with --cluster")
        cluster = load_cluster(paths.cluster)

    def check(driver: Driver) -> None:
        if manifest is not None:
            submit.check(driver, manifest.text, str(manifest.path), manifest.folder)

    def first_jobs(driver: Driver) -> None:
        if manifest is not None:
            keys = submit.submit(driver, manifest.text, str(manifest.path), manifest.folder)
        else:
            keys = [key for key in sorted(driver.jobs) if not driver.view(key).finished]
        opened(keys)

    return drive(
        cluster,
        paths.root,
        preload=[*preload, *_preloads(manifest, paths)],
        keep=keep,
        check=check,
        opened=first_jobs,
        ready=ready,
    )


def _preloads(manifest: Manifest | None, paths: StatePaths) -> list[str]:
    from flyer.local import submit
    from flyer.local.pod_specs import with_folder
    from flyer.local.preloads import preloads_of
    from flyer.local.store import read_jobs

    jobs = list(read_jobs(paths))
    if manifest is not None:
        submitted = submit.read_manifest(manifest.text, str(manifest.path))
        jobs += [with_folder(job, manifest.folder) for job in submitted]
    return sorted({name for job in jobs for name in preloads_of(job)})
