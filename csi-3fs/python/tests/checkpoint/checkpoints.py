"""Managers over a plain directory, and a state with every kind of value."""

import math
import threading

from threefs.checkpoint import CheckpointManager

FOLDER = "/ckpt/gpt"


def managers(files, world_size=1, attempt="a1", **options):
    return [
        CheckpointManager(files, FOLDER, rank, world_size, attempt=attempt, **options)
        for rank in range(world_size)
    ]


def save_all(ranks, step, state, **options):
    handles = [rank.save(step, state, **options) for rank in ranks]
    return [handle.wait(20) for handle in handles]


STATE = {
    "bytes": bytes(range(256)) * 40,
    "empty": b"",
    "numbers": {"one": 1, "half": 0.5, "nan": math.nan, "inf": -math.inf, "big": 2**70},
    "words": ["ü", "", None, True, False],
    "pair": (1, (2.5, [])),
    "keys": {0: "int", "0": "text", -1: b"x", "a/b": b"y"},
}


def same(first, right):
    if isinstance(first, float) and math.isnan(first):
        return isinstance(right, float) and math.isnan(right)
    if isinstance(first, dict):
        return list(first) == list(right) and all(same(first[key], right[key]) for key in first)
    if isinstance(first, list | tuple):
        pairs = zip(first, right, strict=True)
        return type(first) is type(right) and all(same(value, other) for value, other in pairs)
    return type(first) is type(right) and first == right


def wait_for_threads():
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-"):
            thread.join(10)
