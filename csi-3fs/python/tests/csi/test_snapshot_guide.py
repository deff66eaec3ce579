"""The objects of docs/guides/volumes.md about snapshots, as calls that sidecars make of them.

The page's snapshot is made of the page's claim `dataset`, and its claims are copies of both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.volumes.parameters import quantity_bytes

from .copying import of_snapshot, of_volume, retried
from .driver import Driver, capability

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "volumes.md"
MARKER = f"<!-- test: elsewhere csi-3fs/python/tests/csi/{Path(__file__).name} -->\n```yaml\n"


def shown() -> dict[str, Any]:
    """The objects of the page by name."""
    texts = [part.partition("```")[0] for part in PAGE.read_text().split(MARKER)[1:]]
    objects = [each for text in texts for each in YAML(typ="safe").load_all(text)]
    return {each["metadata"]["name"]: each for each in objects}


def size_of(claim: Any) -> int:
    return quantity_bytes("storage", claim["spec"]["resources"]["requests"]["storage"])


def test_the_objects_of_the_page_work(driver: Driver) -> None:
    objects = shown()
    assert set(objects) == {"before-training", "restored", "copy"}
    snapshot_object, restored, copy = (
        objects[name] for name in ("before-training", "restored", "copy")
    )
    sizes = csi.CapacityRange(required_bytes=size_of(restored))
    dataset = driver.create("dataset", capacity_range=sizes).volume_id
    driver.files.write("/volumes/dataset/data/file", 1 << 20)
    assert snapshot_object["spec"]["source"] == {"persistentVolumeClaimName": "dataset"}
    request = csi.CreateSnapshotRequest(name="before-training", source_volume_id=dataset)
    snapshot = driver.call(request).snapshot
    assert restored["spec"]["dataSource"]["kind"] == snapshot_object["kind"] == "VolumeSnapshot"
    assert restored["spec"]["dataSource"]["name"] == "before-training"
    assert copy["spec"]["dataSource"] == {"kind": "PersistentVolumeClaim", "name": "dataset"}
    for claim, source in (
        (restored, of_snapshot(snapshot.snapshot_id)),
        (copy, of_volume(dataset)),
    ):
        assert claim["spec"]["storageClassName"] == "threefs"
        volume = retried(
            driver,
            csi.CreateVolumeRequest(
                name=claim["metadata"]["name"],
                volume_capabilities=[capability()],
                capacity_range=csi.CapacityRange(required_bytes=size_of(claim)),
                volume_content_source=source,
            ),
        ).volume
        assert volume.capacity_bytes == size_of(claim)
        path = f"/volumes/{claim['metadata']['name']}/data/file"
        assert driver.files.stat(path).size == 1 << 20


@pytest.mark.parametrize("limit", [64, 256, 254])
def test_the_page_has_the_limits_of_the_driver(limit: int) -> None:
    from threefs.csi.copies import copies

    page = PAGE.read_text()
    assert str(limit) in page
    assert {copies.JOBS_OF_TENANT_MAX, copies.JOBS_MAX} == {64, 256}
