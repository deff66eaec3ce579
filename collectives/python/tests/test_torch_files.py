"""Test files of torch's sources over HFReduce: each test ends as over Gloo, or is listed.

The files are not part of the wheel. TORCH_SOURCES names torch's sources: a checkout of the
installed release, or Debian's source package (with `deb-src` of release 13 in apt's sources)::

    git clone --depth 1 --branch v2.15.0 https://github.com/pytorch/pytorch
    apt-get source --download-only pytorch && tar xJf pytorch_*.orig.tar.xz

    TORCH_SOURCES=pytorch-v2.6.0 pytest -m torch collectives/python/tests/test_torch_files.py

The files run unchanged. Those that torch wrote for GPUs run on the CPU (`torch_on_cpu`), those of
`fully_shard` also with `haiscale.fsdp`. Expectations of an older file about an older torch fail
over all backends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from torch_on_cpu import CpuLoader

FOLDER = Path(__file__).parent
LISTED = json.loads((FOLDER / "torch_files.json").read_text(encoding="utf-8"))
SECONDS = 900


def endings(backend: str, sources: Path, file: str) -> dict[str, str]:
    """Result of each test of a file over a backend, by class and name; failures with their text."""
    result = subprocess.run(
        [sys.executable, FOLDER / "torch_files.py", backend, sources / "test/distributed", file],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    results = json.loads(result.stdout.splitlines()[-1])
    short = {test: ".".join(test.split(".")[-2:]) for kind in results.values() for test in kind}
    return (
        {short[test]: "passed" for test in results["passed"]}
        | {short[test]: f"skipped: {why}" for test, why in results["skipped"].items()}
        | {short[test]: f"failed: {text}" for test, text in results["failed"].items()}
    )


def kind(ending: str) -> str:
    """A failure without its text, which contains the names of backends and processes."""
    return "failed" if ending.startswith("failed") else ending


def differences(gloo: dict[str, str], other: dict[str, str]) -> list[str]:
    """Tests that end in another way than over Gloo."""
    assert gloo.keys() == other.keys()
    return [test for test in gloo if kind(gloo[test]) != kind(other[test])]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS + 30)
@pytest.mark.parametrize("file", [*LISTED["files"], *LISTED["for_gpus"]])
def test_files_of_torchs_suite_have_the_same_results_as_over_gloo(file: str) -> None:
    if "TORCH_SOURCES" not in os.environ:
        pytest.skip("TORCH_SOURCES is not set to a checkout of torch's sources")
    pytest.importorskip("expecttest", reason="torch's tests import it; it is in our dev group")
    sources = Path(os.environ["TORCH_SOURCES"])
    gloo = endings("gloo", sources, file)
    for backend in ("hfreduce", "haiscale") if file in LISTED["fully_shard"] else ("hfreduce",):
        other = endings(backend, sources, file)
        differ = differences(gloo, other)
        texts = [
            f"{test}: over Gloo {gloo[test]}\nwith {backend} {other[test]}"
            for test in differ
            if test not in LISTED["differ"]
        ]
        if texts:
            pytest.fail("\n\n".join(texts), pytrace=False)
        # Tests that no longer differ must be removed from the list.
        assert not [test for test in LISTED["differ"] if test in gloo and test not in differ]


FOR_GPUS = """
import torch

backend = "nccl"
devices = [torch.device("cuda", 1), torch.device(f"cuda:{1}"), torch.device("cuda:" + str(1))]
streams = torch.cuda.current_stream() is torch.cpu.current_stream()
has_setting = torch.backends.cuda.matmul is not None

def moved(tensor, test):
    return tensor.cuda(1).to(test.rank).to(device=test.rank)

def annotated(tensor: torch.Tensor): ...
"""


@pytest.mark.torch
def test_files_for_gpus_are_imported_for_the_cpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "for_gpus.py"
    path.write_text(FOR_GPUS, encoding="utf-8")
    loader = CpuLoader("for_gpus", str(path))
    names: dict[str, Any] = {}
    exec(loader.get_code("for_gpus"), names)
    assert names["backend"] == "gloo"
    assert names["devices"] == [torch.device("cpu")] * 3
    assert names["streams"]
    assert names["has_setting"]
    assert names["moved"](torch.ones(1), SimpleNamespace(rank=1)).is_cpu
    assert names["annotated"].__annotations__ == {"tensor": torch.Tensor}
    assert not list(tmp_path.glob("__pycache__")), "it would be used without the replacements"
