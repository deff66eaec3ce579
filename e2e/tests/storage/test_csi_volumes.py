"""A volume on two nodes of one host, through the deployed driver and a real 3FS."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from threefs.csi.proto import csi_pb2 as csi

from e2e.lib.csi import CALL_SECONDS, Deployed, has_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from e2e.lib.csi import NodeProcesses

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="FUSE mounts need root"),
    pytest.mark.timeout(600),
]

MEBIBYTE = 1 << 20
PATIENCE_SECONDS = 60.0
UNDO_SECONDS_MAX = 5.0
Mode = csi.VolumeCapability.AccessMode
EVERYWHERE = csi.VolumeCapability(
    mount=csi.VolumeCapability.MountVolume(),
    access_mode=Mode(mode=Mode.MULTI_NODE_MULTI_WRITER),
)


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    """Two nodes."""
    if not has_daemon():
        pytest.skip("this build of threefs has no FUSE daemon")
    deployed = Deployed(tmp_path)
    try:
        deployed.start(nodes=2)
        yield deployed
    finally:
        deployed.stop()


def create(deployed: Deployed, name: str, size: int = 64 * MEBIBYTE) -> str:
    request = csi.CreateVolumeRequest(
        name=name,
        volume_capabilities=[EVERYWHERE],
        capacity_range=csi.CapacityRange(required_bytes=size),
    )
    reply = deployed.controller().CreateVolume(request, timeout=CALL_SECONDS)
    return str(reply.volume.volume_id)


def mount(node: NodeProcesses, volume: str, pod: str, *, readonly: bool = False) -> Path:
    """Stage and publish; gives what a pod would see."""
    stage, target = node.kubelet / "stage" / volume.rpartition("/")[2], node.kubelet / pod
    stub: Any = node.stub()
    stub.NodeStageVolume(
        csi.NodeStageVolumeRequest(
            volume_id=volume, staging_target_path=str(stage), volume_capability=EVERYWHERE
        ),
        timeout=CALL_SECONDS,
    )
    stub.NodePublishVolume(
        csi.NodePublishVolumeRequest(
            volume_id=volume,
            staging_target_path=str(stage),
            target_path=str(target),
            volume_capability=EVERYWHERE,
            readonly=readonly,
        ),
        timeout=CALL_SECONDS,
    )
    return target


def undo(node: NodeProcesses, volume: str, pod: str, *, unstage: bool = True) -> None:
    stub: Any = node.stub()
    stub.NodeUnpublishVolume(
        csi.NodeUnpublishVolumeRequest(volume_id=volume, target_path=str(node.kubelet / pod)),
        timeout=CALL_SECONDS,
    )
    if unstage:
        stage = node.kubelet / "stage" / volume.rpartition("/")[2]
        stub.NodeUnstageVolume(
            csi.NodeUnstageVolumeRequest(volume_id=volume, staging_target_path=str(stage)),
            timeout=CALL_SECONDS,
        )


def condition(node: NodeProcesses, volume: str, target: Path) -> Any:
    request = csi.NodeGetVolumeStatsRequest(volume_id=volume, volume_path=str(target))
    stub: Any = node.stub()
    return stub.NodeGetVolumeStats(request, timeout=CALL_SECONDS)


def sh(command: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """In a child with a deadline: a mount that hangs must not hang the tests."""
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=check,
    )


def test_a_volume_shared_by_two_nodes_survives_restarts_of_all_csi_processes(
    deployed: Deployed,
) -> None:
    first, second = deployed.nodes
    started_at = time.monotonic()
    volume = create(deployed, "pvc-1")
    first_mount = mount(first, volume, "pod-a")
    sh(f"echo first > {first_mount}/byte")
    print(f"claim to first byte, without Kubernetes: {time.monotonic() - started_at:.2f} s")
    second_mount = mount(second, volume, "pod-b")
    assert sh(f"cat {second_mount}/byte").stdout == "first\n"
    sh(f"echo second >> {second_mount}/byte")
    assert sh(f"cat {first_mount}/byte").stdout == "first\nsecond\n"

    # The daemon dies under an open file.
    mount_state = first.mount_manager_client.state()[1][0]
    with (first_mount / "open").open("wb", buffering=0) as file:
        file.write(b"before")
        os.kill(mount_state.pid, signal.SIGKILL)
        file.write(b" after")
        os.fsync(file.fileno())
    assert sh(f"cat {second_mount}/open").stdout == "before after"
    reported = condition(first, volume, first_mount)
    assert not reported.volume_condition.abnormal
    assert "replaced 1 times" in reported.volume_condition.message

    # A stopped daemon is reported, and continues.
    mount_state = first.mount_manager_client.state()[1][0]
    os.kill(mount_state.pid, signal.SIGSTOP)
    try:
        assert condition(first, volume, first_mount).volume_condition.abnormal
    finally:
        os.kill(mount_state.pid, signal.SIGCONT)

    # The node service is restarted, then the mount manager is replaced.
    first.driver.terminate()
    first.driver.wait(PATIENCE_SECONDS)
    assert sh(f"cat {first_mount}/byte").stdout == "first\nsecond\n"
    first.driver = deployed.node_service(first.folder)
    with (first_mount / "over").open("wb", buffering=0) as file:
        file.write(b"old")
        first.mount_manager = deployed.mount_manager(first.folder)
        file.write(b" new")
        os.fsync(file.fileno())
    assert sh(f"cat {second_mount}/over").stdout == "old new"

    for node, pod in ((first, "pod-a"), (second, "pod-b")):
        started_at = time.monotonic()
        undo(node, volume, pod)
        assert time.monotonic() - started_at < 2 * UNDO_SECONDS_MAX
        assert node.mount_manager_client.state() == ([], [])
    deployed.controller().DeleteVolume(
        csi.DeleteVolumeRequest(volume_id=volume), timeout=CALL_SECONDS
    )


def test_the_size_is_a_hard_limit_that_grows_under_a_running_pod(deployed: Deployed) -> None:
    node = deployed.nodes[0]
    volume = create(deployed, "small", 4 * MEBIBYTE)
    target = mount(node, volume, "pod")
    full = sh(f"dd if=/dev/zero of={target}/a bs=1M count=8 conv=fsync", check=False)
    assert full.returncode != 0
    assert "quota" in full.stderr.lower() or "space" in full.stderr.lower(), full.stderr
    deployed.controller().ControllerExpandVolume(
        csi.ControllerExpandVolumeRequest(
            volume_id=volume, capacity_range=csi.CapacityRange(required_bytes=32 * MEBIBYTE)
        ),
        timeout=CALL_SECONDS,
    )
    sh(f"dd if=/dev/zero of={target}/a bs=1M count=8 conv=fsync")
    usage = condition(node, volume, target).usage[0]
    assert (usage.total, usage.used) == (32 * MEBIBYTE, 8 * MEBIBYTE)
    blocks = int(sh(f"df -B1 --output=size {target} | tail -1").stdout)
    assert blocks == 32 * MEBIBYTE


def test_a_read_only_volume_cannot_be_written(deployed: Deployed) -> None:
    node = deployed.nodes[0]
    volume = create(deployed, "shared")
    writable = mount(node, volume, "rw")
    read_only = mount(node, volume, "ro", readonly=True)
    sh(f"echo text > {writable}/file")
    assert sh(f"cat {read_only}/file").stdout == "text\n"
    refused = sh(f"echo more > {read_only}/file", check=False)
    assert "Read-only file system" in refused.stderr


def test_unmounting_never_waits_for_a_lost_cluster(deployed: Deployed) -> None:
    node = deployed.nodes[0]
    volume = create(deployed, "doomed")
    target = mount(node, volume, "pod")
    sh(f"echo text > {target}/file")
    # All of 3FS stops answering while a process waits for it in the kernel.
    pids = [int(pid) for pid in sh(f"pgrep -f {deployed.folder}/3fs").stdout.split()]
    own = [pid for pid in pids if "threefs.service" in _command(pid)]
    assert len(own) >= 5
    for pid in own:
        os.kill(pid, signal.SIGSTOP)
    try:
        waiting = subprocess.Popen(["cat", f"{target}/file"], stderr=subprocess.DEVNULL)
        time.sleep(0.5)
        for unstage in (False, True):
            started_at = time.monotonic()
            undo(node, volume, "pod", unstage=unstage)
            assert time.monotonic() - started_at < UNDO_SECONDS_MAX * (2 if unstage else 1)
        waiting.wait(PATIENCE_SECONDS)
        assert node.mount_manager_client.state() == ([], [])
    finally:
        for pid in own:
            os.kill(pid, signal.SIGCONT)


def test_a_missing_volume_is_not_mounted(deployed: Deployed) -> None:
    with pytest.raises(grpc.RpcError, match="does not exist"):
        mount(deployed.nodes[0], "v1:default:/volumes/none", "pod")
    assert deployed.nodes[0].mount_manager_client.state() == ([], [])


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
