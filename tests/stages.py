"""pytest plugin: divides all tests into the stages of `make test`, each test into exactly one.

`pytest --stage unit` collects the folders of that stage and drops the tests of other stages.
Tests marked `soak` belong to no stage; `make soak` runs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

__all__ = ["STAGES", "stage_of"]

STAGES: Final = ("unit", "simulators", "services", "mounts")
ROOT: Final = Path(__file__).resolve().parents[1]

_FOLDERS: Final = {
    # Pure code: no processes of services. Tests marked slow or alone run with the services.
    "unit": (
        "operator/tests/api", "operator/tests/engine", "deviceplugin/tests", "images/tests",
        "charts/tests", "tests",
    ),
    # Seeded histories on a virtual clock.
    "simulators": ("operator/tests/sim",),
    # FUSE mounts and the CSI driver.
    "mounts": ("csi-3fs/python/tests/fuse", "csi-3fs/python/tests/csi"),
}  # fmt: skip


def stage_of(path: Path, marks: set[str]) -> str | None:
    """The stage of a test in the file `path`; None for a test that no stage runs."""
    if "soak" in marks:
        return None
    for stage, folders in _FOLDERS.items():
        if any(path.is_relative_to(ROOT / folder) for folder in folders):
            heavy = stage == "unit" and marks & {"slow", "alone", "real_server"}
            return "services" if heavy else stage
    return "services"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --stage."""
    parser.addoption("--stage", choices=STAGES, help="run the tests of one stage of `make test`")


def pytest_configure(config: pytest.Config) -> None:
    """Collects only the folders of the stage."""
    stage = config.getoption("--stage")
    if stage in _FOLDERS and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = [str(ROOT / folder) for folder in _FOLDERS[stage]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops the tests of other stages."""
    stage = config.getoption("--stage")
    if stage is None:
        return
    selected, dropped = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        (selected if stage_of(item.path, marks) == stage else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = selected
