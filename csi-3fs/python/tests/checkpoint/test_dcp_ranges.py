"""Parts of tensors in shards: any box is read, and places outside of shards are damage."""

import random
from dataclasses import replace

import pytest
from threefs.checkpoint import CheckpointDamagedError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from threefs.checkpoint.distributed import shard as shard_module  # noqa: E402  after importorskip
from threefs.checkpoint.distributed.index import (  # noqa: E402
    Index,
    Item,
    decode_index,
    encode_index,
)
from threefs.checkpoint.distributed.ranges import TensorRead, read_all  # noqa: E402

ITEM = Item("x", [0], "shard", 0, 8, "uint8", [8], [0])


def test_any_box_of_a_stored_tensor_is_read(files, monkeypatch):
    """Small blocks, so that boxes begin and end inside of them."""
    monkeypatch.setattr(shard_module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(shard_module, "BATCH_BYTES", 4096)
    files.mkdir("/c")
    chance = random.Random(1)
    for number in range(300):
        shape = [chance.randrange(1, 9) for _ in range(chance.randrange(4))]
        dtype = chance.choice([torch.float32, torch.int8, torch.complex128, torch.bool])
        stored = (torch.rand(*shape, 16) * 2).to(torch.uint8).view(dtype)[..., 0]
        writer = shard_module.ShardWriter(files, "/c", f"shard-{number}")
        writer.add_bytes("before", memoryview(bytearray(chance.randrange(5000))))
        item = writer.add_tensor("x", [0] * len(shape), stored)
        writer.close()
        offsets = [chance.randrange(extent) for extent in shape]
        lengths = [
            chance.randrange(extent - offset + 1)
            for extent, offset in zip(shape, offsets, strict=True)
        ]
        target = torch.zeros(lengths, dtype=dtype)
        if chance.random() < 0.3:
            target = torch.zeros([*reversed(lengths)], dtype=dtype).permute(
                list(reversed(range(len(lengths))))
            )
        index = Index("s", shard_module.ALGORITHM, 64, {item.shard: writer.length}, [item])
        read = TensorRead(item, offsets, lengths, target, lambda _: None)
        read_all(files, "/c", index, [read])
        box = tuple(
            slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True)
        )
        assert torch.equal(target, stored[box]), (number, dtype, shape, offsets, lengths)


@pytest.mark.parametrize(
    "place",
    [
        {"offset": 4, "length": 8},
        {"offset": -8},
        {"offset": 8, "length": -8, "checksums": []},
        {"length": 1 << 62},
        {"shard": "../shard"},
        {"shard": "other"},
        {"checksums": []},
    ],
)
def test_a_manifest_that_names_places_outside_its_shards_is_damage(place):
    item = replace(ITEM, **place)
    index = Index("s", "crc32", 64, {"shard": 10, "../shard": 10}, [item])
    with pytest.raises(CheckpointDamagedError, match=r"/c: .* invalid place for `x`"):
        decode_index(encode_index(index, b""), "/c")


@pytest.mark.parametrize(
    ("index", "item"),
    [
        ({"shards": []}, {}),
        ({"block_bytes": "64"}, {}),
        ({}, {"offset": "0"}),
        ({}, {"shard": ["shard"]}),
        ({}, {"checksums": 1}),
    ],
)
def test_a_manifest_with_values_of_another_type_is_damage(index, item):
    whole = Index("s", "crc32", 64, {"shard": 10}, [ITEM])
    assert decode_index(encode_index(whole, b"m"), "/c") == (whole, b"m")
    other = replace(whole, items=[replace(ITEM, **item)], **index)
    with pytest.raises(CheckpointDamagedError, match="/c: the manifest is torn"):
        decode_index(encode_index(other, b""), "/c")
