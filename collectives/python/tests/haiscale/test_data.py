"""haiscale.data: every sample once per epoch, and the same order in every layout."""

from itertools import pairwise

import pytest
from haiscale.data import Order
from hypothesis import given
from hypothesis import strategies as st


@given(
    samples=st.integers(1, 400), batch=st.integers(1, 60), seed=st.integers(-(2**70), 2**70),
    epochs=st.integers(1, 3),
)  # fmt: skip
def test_each_epoch_has_every_sample_once(samples, batch, seed, epochs):
    order = Order(samples, batch, seed)
    steps = -(-samples * epochs // batch)
    read = [sample for step in range(steps) for sample in order.step(step)]
    for epoch in range(epochs):
        assert sorted(read[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@given(st.integers(1, 10**12), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.integers(0, 10**9))
def test_the_parts_of_a_step_are_the_step(samples, parts, step):
    order = Order(samples, 24, seed=7)
    shares = [order.step(step, part, parts) for part in range(parts)]
    assert {len(share) for share in shares} == {24 // parts}
    assert [sample for share in shares for sample in share] == order.step(step)


def test_the_order_is_the_same_in_every_release():
    """A checkpoint has the step alone: another order would repeat samples and leave others out."""
    assert Order(1000, 8, seed=1).step(0) == [600, 531, 243, 171, 411, 269, 212, 986]
    assert Order(30_000_000, 4, seed=5).step(10**7) == [6856955, 2396599, 14097030, 12675397]


def test_seeds_and_epochs_have_different_orders():
    first = Order(500, 500, seed=1)
    assert first.step(0) != first.step(1)
    assert first.step(0) != Order(500, 500, seed=2).step(0)


def test_neighbours_are_spread():
    read = Order(1 << 16, 1 << 16, seed=5).step(0)
    near = sum(abs(one - other) <= 100 for one, other in pairwise(read))
    assert near < 300  # 200 are expected of a random permutation


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Order(0, 4), "invalid samples 0: expected at least 1"),
        (lambda: Order(4, 0), "invalid batch 0"),
        (lambda: Order(9, 4).step(0, 0, 3), "a batch of 4 samples does not divide into 3 parts"),
        (lambda: Order(9, 4).step(0, 2, 2), "step 0, part 2 of 2"),
        (lambda: Order(9, 4).step(-1), "step -1"),
    ],
)
def test_invalid_sizes_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
