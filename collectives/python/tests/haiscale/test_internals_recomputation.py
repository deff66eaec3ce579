"""haiscale.internals.recomputation: torch's checkpoints are recognized."""

import pytest
import torch
from haiscale.internals.recomputation import ends_recomputation, in_backward
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.torch


def test_a_pass_in_backward_and_its_end_are_recognized():
    passes = []

    def layer(x):
        passes.append(in_backward())
        try:
            return (x * 2).exp().square() + 1
        except Exception as error:
            passes.append(ends_recomputation(error))
            raise

    x = torch.ones(2, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert passes == [False, True, True]
    assert not in_backward()
    assert not ends_recomputation(ValueError())
