"""csi-sanity against the driver with 3FS in memory, and real mounts by a real manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from testcluster import csi_sanity

from .driver import Driver
from .mount_manager_process import MountManagerProcess, can_mount

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="FUSE mounts need root and /dev/fuse")
@pytest.mark.timeout(900)
def test_csi_sanity_passes(tmp_path: Path) -> None:
    program = csi_sanity.build()
    if program is None:
        pytest.skip("csi-sanity is built with Go, which is not installed")
    manager = MountManagerProcess(tmp_path / "node")
    manager.start()
    driver = Driver(tmp_path / "driver", mount_manager=manager.client, name=csi_sanity.DRIVER_NAME)
    endpoint = f"unix://{tmp_path}/driver/csi.sock"
    try:
        outcome = csi_sanity.run(
            program, endpoint, endpoint, manager.kubelet, tmp_path / "sanity.xml"
        )
    finally:
        driver.close()
        manager.close()
    assert outcome.failed == (), outcome.text
    assert outcome.status == 0, outcome.text
    assert outcome.passed >= 79, outcome.text
    unexpected = [text for text in outcome.skipped if not text.endswith(("supported", "pending"))]
    assert unexpected == []
    assert driver.files.paths() == REMAINING


REMAINING = [
    "/",
    "/.csi",
    "/.csi/copies",
    "/.csi/parents",
    "/.csi/parents/%2Fvolumes",
    "/.csi/snapshots",
    "/volumes",
]
