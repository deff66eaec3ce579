"""A plain directory that stores checkpoints."""

import pytest
from threefs.checkpoint import LocalFiles


@pytest.fixture
def files(tmp_path):
    return LocalFiles(tmp_path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ckpt" / "gpt"
