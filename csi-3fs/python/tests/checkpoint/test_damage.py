"""Damaged checkpoints: detection, and the previous checkpoint in their place."""

import json
import zlib
from dataclasses import replace

import pytest
from threefs.checkpoint import CheckpointNotFoundError
from threefs.checkpoint.manifest import Manifest

from .checkpoints import FOLDER, managers, save_all


def short_shard(folder):
    (folder / "shard-0001.bin").write_bytes((folder / "shard-0001.bin").read_bytes()[:-1])


def long_shard(folder):
    with (folder / "shard-0001.bin").open("ab") as file:
        file.write(b"x")


def missing_shard(folder):
    (folder / "shard-0000.bin").unlink()


def flipped_bit(folder):
    data = bytearray((folder / "shard-0001.bin").read_bytes())
    data[len(data) // 2] ^= 0x10
    (folder / "shard-0001.bin").write_bytes(data)


def torn_manifest(folder):
    data = (folder / "manifest.jsonl").read_bytes()
    (folder / "manifest.jsonl").write_bytes(data[: len(data) // 2])


def manifest_without_checksum(folder):
    data = (folder / "manifest.jsonl").read_bytes()
    (folder / "manifest.jsonl").write_bytes(data.partition(b"\n")[0])


def altered_manifest(folder):
    data = (folder / "manifest.jsonl").read_bytes()
    (folder / "manifest.jsonl").write_bytes(data.replace(b'"world_size": 2', b'"world_size": 3'))


def manifest_with_another_type(folder):
    """Its checksum is valid."""
    manifest = Manifest.decode((folder / "manifest.jsonl").read_bytes())
    (folder / "manifest.jsonl").write_bytes(replace(manifest, shards=[]).encode())


def missing_manifest(folder):
    (folder / "manifest.jsonl").unlink()


def empty_folder(folder):
    for path in folder.iterdir():
        path.unlink()


DAMAGES = [
    (short_shard, "shard-0001.bin` has"),
    (long_shard, "shard-0001.bin` has"),
    (missing_shard, "shard-0000.bin` is missing"),
    (flipped_bit, "wrong checksum"),
    (torn_manifest, "torn"),
    (manifest_without_checksum, "torn"),
    (altered_manifest, "checksum is wrong"),
    (manifest_with_another_type, "torn"),
    (missing_manifest, "no manifest"),
    (empty_folder, "no manifest"),
]


@pytest.mark.parametrize(
    ("damage", "reason"), DAMAGES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_damaged_checkpoint_is_skipped_for_the_previous_one_and_reported(
    files, folder, caplog, damage, reason
):
    ranks = managers(files, 2)
    save_all(ranks, 1, {"x": b"1" * 10_000})
    save_all(ranks, 2, {"x": b"2" * 10_000})
    damage(folder / "step-00000002")
    for rank in ranks:
        loaded = rank.load()
        assert (loaded.step, loaded.state) == (1, {"x": b"1" * 10_000})
        (skipped,) = loaded.report.skipped
        assert skipped.path == f"{FOLDER}/step-00000002"
        assert reason in skipped.reason
    assert "step-00000002 is damaged" in caplog.text
    with pytest.raises(CheckpointNotFoundError, match=reason):
        ranks[0].load(2)
    damage(folder / "step-00000001")
    with pytest.raises(CheckpointNotFoundError, match="step-00000001"):
        ranks[0].load_latest()


@pytest.mark.parametrize("change", [
    lambda body: body["pieces"].pop(),
    lambda body: body["pieces"][0].update(length=1),
    lambda body: body["pieces"][0].update(shard="../../etc/passwd"),
    lambda body: body["pieces"][0].update(offset=-1),
    lambda body: body["entries"][0].update(length=2**62),
    lambda body: body["entries"][0].update(shape=[-1]),
    lambda body: body.update(tree={"kind": "leaf", "name": "unknown"}),
    lambda body: body.update(tree=[1]),
    lambda body: body.update(algorithm="md5"),
    lambda body: body.update(version=2),
    lambda body: body.update(entries=7),
])  # fmt: skip
def test_an_invalid_manifest_is_damage_even_with_a_valid_checksum(files, folder, change):
    (manager,) = managers(files)
    manager.save(1, {"x": b"1" * 100}).wait(20)
    manager.save(2, {"x": b"2" * 100}).wait(20)
    path = folder / "step-00000002" / "manifest.jsonl"
    body = json.loads(path.read_bytes().partition(b"\n")[0])
    change(body)
    text = json.dumps(body).encode()
    path.write_bytes(text + b'\n{"crc32": %d}\n' % zlib.crc32(text))
    assert manager.load().step == 1
