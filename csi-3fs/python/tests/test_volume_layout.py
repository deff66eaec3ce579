"""Layout of the files of a volume in a real 3FS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threefs.client import Client
from threefs.cluster import ClusterFile
from threefs.csi.volumes.parameters import Parameters
from threefs.csi.volumes.removal import remove_volume
from threefs.csi.volumes.volume_id import VolumeId
from threefs.csi.volumes.volumes import Volumes

if TYPE_CHECKING:
    import threefs


def test_files_of_a_volume_in_3fs_have_the_layout(
    cluster: Any, client: threefs.Client, folder: str
) -> None:
    control = Client(ClusterFile.read(cluster.folder), control_plane=True)
    volumes = Volumes("default", control)
    volume = VolumeId.make("default", folder, "pvc-1")
    parameters = Parameters.parse({"path": folder, "chunkSize": "128Ki", "stripe": "1"})
    volumes.create(volume, "pvc-1", 1 << 20, parameters)
    client.mkdir(f"{volume.path}/data/deep/er", parents=True)
    for below in ("data", "data/deep/er"):
        path = f"{volume.path}/{below}/file"
        with client.open(path, "wb") as file:
            file.write(b"x" * 300_000)
        status = client.stat(path)
        assert (status.chunk_bytes, status.stripe) == (128 << 10, 1)
        assert client.stat(f"{volume.path}/{below}").chunk_bytes == 128 << 10
    remove_volume(volumes, volume)
    control.close()
