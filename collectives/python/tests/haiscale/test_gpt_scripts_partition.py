"""Stages of training scripts whose layers are sliced, replaced, changed or in another order."""

import gc
import threading
import weakref

import pytest
import torch
from haiscale.pipeline import partition
from torch import nn

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200, func_only=True)]


def layers(count=4, seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def test_a_part_holds_no_memory_of_other_stages():
    model = layers()
    model[3].table = torch.zeros(8)  # neither a parameter nor a buffer
    model[3].lock = threading.Lock()  # cannot be copied
    table = weakref.ref(model[3].table)
    part = partition(model, 0, 2)
    assert not hasattr(part.whole["3"], "table")
    del model
    gc.collect()
    assert table() is None
