"""csi-sanity against the deployed driver: processes, a real 3FS, real FUSE mounts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from e2e.lib.csi import Deployed, has_daemon
from programs import binaries
from testcluster import csi_sanity

if TYPE_CHECKING:
    from collections.abc import Iterator

REPORT = Path(__file__).parents[3] / "build" / "e2e" / "csi-sanity.xml"


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    """Everything, ended after the test."""
    if not has_daemon():
        pytest.skip("this build of threefs has no FUSE daemon")
    deployed = Deployed(tmp_path)
    try:
        deployed.start()
        yield deployed
    finally:
        deployed.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="FUSE mounts need root")
@pytest.mark.timeout(1200)
def test_csi_sanity_passes(deployed: Deployed) -> None:
    """No failures; only tests of capabilities that the driver does not advertise are skipped."""
    program = binaries.require("csi-sanity")["csi-sanity"]
    node = deployed.nodes[0]
    outcome = csi_sanity.run(
        program, node.endpoint, deployed.controller_endpoint, node.kubelet, REPORT
    )
    assert outcome.failed == (), outcome.text + deployed.log()
    assert outcome.status == 0, outcome.text
    assert outcome.passed >= 56, outcome.text
    assert all(words.endswith(("supported", "pending")) for words in outcome.skipped)
