"""CSI controllers as processes, which tests kill; run as a program it is one.

Claims expire after 2 s instead of 20, and are taken over after 3 s.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.proto import csi_pb2_grpc as stubs

if TYPE_CHECKING:
    from collections.abc import Callable

CLAIM_SECONDS, WATCH_SECONDS, RENEW_SECONDS = 2.0, 3.0, 0.5
CALL_SECONDS = 60.0
START_SECONDS = 60.0
Sources = csi.VolumeContentSource


class Controller:
    """One controller of a cluster."""

    def __init__(self, cluster_file: Path, folder: Path, workers: int = 4) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        default = folder / "clusters" / "default"
        default.mkdir(parents=True)
        data = json.loads(cluster_file.read_text())
        data["key_file"] = str((cluster_file.parent / data["key_file"]).resolve())
        (default / "cluster.json").write_text(json.dumps(data))
        self._log = (folder / "log").open("w")
        self._endpoint = f"unix://{folder}/csi.sock"
        self.process = subprocess.Popen(
            [sys.executable, __file__, self._endpoint, str(folder / "clusters"), str(workers)],
            stderr=self._log,
        )
        self.channel = grpc.insecure_channel(self._endpoint)
        self.stub = stubs.ControllerStub(self.channel)
        grpc.channel_ready_future(self.channel).result(START_SECONDS)

    def call(self, request: Any) -> Any:
        name = type(request).__name__.removesuffix("Request")
        return getattr(self.stub, name)(request, timeout=CALL_SECONDS)

    def code(self, request: Any) -> tuple[str, str]:
        """The code and message of a call."""
        try:
            self.call(request)
        except grpc.RpcError as error:
            call: Any = error
            return call.code().name, call.details()
        return "OK", ""

    def retried(self, request: Any, seconds: float = 120.0) -> Any:
        """The reply of a call that is repeated as the provisioner repeats it."""
        deadline = time.monotonic() + seconds
        while True:
            code, message = self.code(request)
            if code == "OK":
                return self.call(request)
            if code not in ("ABORTED", "UNAVAILABLE") or time.monotonic() > deadline:
                raise AssertionError((code, message))
            time.sleep(0.05)

    def kill(self) -> None:
        """End it without a chance to do anything."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)
        self._log.close()


def volume_request(name: str, source: Sources | None = None, **more: Any) -> Any:
    mode = csi.VolumeCapability.AccessMode
    capability = csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(),
        access_mode=mode(mode=mode.MULTI_NODE_MULTI_WRITER),
    )
    return csi.CreateVolumeRequest(
        name=name, volume_capabilities=[capability], volume_content_source=source, **more
    )


def of_volume(volume: str) -> Sources:
    return Sources(volume=Sources.VolumeSource(volume_id=volume))


def of_snapshot(snapshot: str) -> Sources:
    return Sources(snapshot=Sources.SnapshotSource(snapshot_id=snapshot))


def leftovers(client: Any, volumes: list[str]) -> list[str]:
    """What copies have left in a cluster."""
    left = []
    for path in ("/.csi/copies", "/.csi/removed"):
        if client.exists(path):
            left += [f"{path}/{name}" for name in client.listdir(path)]
    for volume in volumes:
        path = f"/volumes/{volume}"
        left += [f"{path}/{name}" for name in client.listdir(path) if name != "data"]
        left += [each.name for each in client.snapshots(path).all() if each.name[:5] == "copy-"]
    return left


def main() -> None:
    from threefs.csi.copies import copies, volume_copy
    from threefs.csi.server import run_controller
    from threefs.csi.settings import ControllerSettings

    endpoint, clusters, workers = sys.argv[1:]
    volume_copy.CLAIM_SECONDS = CLAIM_SECONDS
    copies.RENEW_SECONDS = RENEW_SECONDS
    real: Callable[..., Any] = copies.NodeClaims
    copies.NodeClaims = lambda holder, **_: real(  # type: ignore[assignment,misc]
        holder, watch_seconds=WATCH_SECONDS
    )
    run_controller(
        ControllerSettings(
            endpoint=endpoint,
            clusters=Path(clusters),
            metrics_port=0,
            copy_workers=int(workers),
        )
    )


if __name__ == "__main__":
    main()
