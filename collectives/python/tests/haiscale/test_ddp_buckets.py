"""The layout of buckets: a function of the parameters and the limit."""

import torch
from haiscale.ddp import groups
from haiscale.ddp.buckets import layout
from haiscale.overlap import groups as shared
from hypothesis import given, strategies

SIZES = strategies.lists(
    strategies.tuples(
        strategies.integers(0, 40), strategies.sampled_from([torch.float32, torch.bfloat16])
    ),
    min_size=1,
    max_size=30,
)


@given(SIZES, strategies.integers(1, 300))
def test_each_parameter_is_in_one_bucket_of_its_type_and_size(sizes, limit):
    parameters = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes]
    buckets = layout(parameters, limit)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({parameters[place].dtype for place in bucket}) == 1
        assert len(bucket) == 1 or sum(parameters[place].nbytes for place in bucket) <= limit


@given(SIZES, strategies.integers(1, 300))
def test_buckets_are_ordered_by_their_last_gradient(sizes, limit):
    """Backward completes parameters in reverse: no bucket waits for one that fills after it."""
    parameters = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes]
    ends = [bucket[-1] for bucket in layout(parameters, limit)]
    assert ends == sorted(ends, reverse=True)


def test_another_backend_has_one_group(monkeypatch):
    monkeypatch.setattr(groups, "communicator", lambda group: None)
    assert groups.prioritized("world", [1, 2, 3], levels=True) == ["world"] * 3


class TwoNodes:
    @staticmethod
    def plan():
        return {"nodes": ["a", "b"]}


def test_levels_have_equal_bytes_and_the_first_layers_the_highest(monkeypatch):
    for module in (groups, shared):
        monkeypatch.setattr(module, "communicator", lambda group: TwoNodes)
    monkeypatch.setattr(groups, "sibling", lambda group, level: level)
    chosen = groups.prioritized("world", [10] * 16, levels=None)
    assert chosen == [level for level in range(8) for _ in range(2)]
    # The middle of a bucket counts: a level may have none.
    assert groups.prioritized("world", [10] * 4, levels=None) == [1, 3, 5, 7]
    assert groups.prioritized("world", [1, 1, 100, 1, 1], levels=None) == [0, 0, 4, 7, 7]
    assert groups.prioritized("world", [10, 10], levels=None) == ["world"] * 2
    assert groups.prioritized("world", [10] * 6, levels=False) == ["world"] * 6
