"""Loads test files that torch wrote for GPUs so that their tests run on the CPU.

The files stay as they are: devices and backends are replaced in the syntax tree, before it is
compiled. `"cuda"` becomes `"cpu"`, `torch.cuda` becomes `torch.cpu`, `"nccl"` becomes `"gloo"`.
What the files import from `torch.testing` gets `RANKS` devices, and runs ranks as processes where
torch runs them as threads, which have no backend.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import wraps
from importlib.machinery import FileFinder, SourceFileLoader
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import CodeType

__all__ = ["CpuLoader", "import_for_cpu", "prepare"]

RANKS = 4
"""Ranks of FSDP's tests, unless a test says how many; pipelining's have 2, as torch runs them."""
RANKS_MAX = 8
_DEVICES = {"device": "'cpu'", "gpus_for_rank": "[['cpu']] * world_size"}
_DEVICE = re.compile(r"^cuda(:\d*)?$")


class _OnCpu(ast.NodeTransformer):
    """Replaces devices and backends."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        value = {"nccl": "gloo", "cpu:gloo,cuda:nccl": "gloo"}.get(node.value, node.value)
        return ast.copy_location(ast.Constant(_DEVICE.sub("cpu", value)), node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if isinstance(node.left, ast.Constant) and str(node.left.value).startswith("cuda:"):
            return ast.copy_location(ast.Constant("cpu"), node)
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and first.value == "cuda:":
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        """Functions and properties that return indexes of GPUs."""
        self.generic_visit(node)
        if (device := _DEVICES.get(node.name)) is not None:
            node.body = [ast.Return(ast.parse(device, mode="eval").body)]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        of = node.value.attr if isinstance(node.value, ast.Attribute) else ""
        if node.attr == "cuda" and of not in {"backends", "version"}:
            node.attr = "cpu"
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.module is not None:
            node.module = re.sub(r"^torch\.cuda\b", "torch.cpu", node.module)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """A CPU has no index: `tensor.cuda(0)`, `torch.device("cuda", 0)`, `tensor.to(rank)`."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        self.generic_visit(node)
        if name == "cuda":
            node.args, node.keywords = [], []
        elif name == "device":
            node.args = node.args[:1]
        elif name == "to":
            node.args = [_CPU if _is_rank(each) else each for each in node.args]
            for each in node.keywords:
                each.value = _CPU if _is_rank(each.value) else each.value
        elif name != "barrier":
            # DistributedDataParallel takes none on the CPU.
            node.keywords = [each for each in node.keywords if each.arg != "device_ids"]
        return node


_CPU = ast.Constant("cpu")


def _is_rank(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "rank"


class CpuLoader(SourceFileLoader):
    """Imports a file for the CPU, without a cache of compiled files."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _OnCpu().visit(ast.parse(self.get_data(path), path))
        fixed = ast.fix_missing_locations(tree)
        # Annotations would otherwise become texts, as in this file.
        code: CodeType = compile(fixed, path, "exec", dont_inherit=True)
        return code


def import_for_cpu(folder: Path) -> None:
    """Lets files of a folder be imported for the CPU, by other test files."""
    finder = FileFinder(str(folder), (CpuLoader, [".py"]))
    sys.path_importer_cache[str(folder)] = finder


def prepare() -> None:
    """Lets torch's test classes run on the CPU; before a test file is imported."""
    import torch
    from torch.testing._internal import common_cuda, common_distributed, common_utils

    common_distributed.skip_if_lt_x_gpu = _skip_above_ranks
    common_distributed.requires_nccl = lambda: lambda test: test
    common_cuda.TEST_CUDA = common_cuda.TEST_MULTIGPU = True
    common_utils.get_cycles_per_ms = lambda: 1
    device: Any = torch.cpu
    device._sleep = lambda _cycles: None
    device.device_count = lambda: RANKS
    device.nccl = torch.cuda.nccl  # for its version
    # The base classes ask for devices before they start ranks.
    torch.accelerator.device_count = lambda: RANKS_MAX
    torch.accelerator.current_accelerator = lambda *_, **__: None
    from torch.testing._internal import common_fsdp

    common_fsdp.DEVICE_COUNT = RANKS
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest
    restore_names()


def restore_names() -> None:
    """What torch 2.6 has and later releases have renamed, removed or changed."""
    from torch.distributed.pipelining import schedules
    from torch.testing._internal import common_distributed, common_fsdp

    common_distributed.MultiProcContinousTest = _fresh_ranks(
        common_distributed.MultiProcContinuousTest
    )
    # Gradients of micro-batches were summed.
    schedules._PipelineSchedule.scale_grads = property(lambda _: False, lambda *_: None)
    # It repeated tests with compiled modules.
    common_fsdp.test_compiled_fsdp = lambda **_unused: lambda test: test


def _skip_above_ranks(devices: int, **_unused: Any) -> Callable[[Any], Any]:
    def decorated(test: Any) -> Any:
        @wraps(test)
        def called(*args: Any, **keywords: Any) -> Any:
            from torch.testing._internal.common_distributed import TEST_SKIPS

            if devices > RANKS_MAX:
                raise SystemExit(TEST_SKIPS[f"multi-device-{devices}"].exit_code)
            return test(*args, **keywords)

        return called

    return decorated


def _fresh_ranks(base: Any) -> Any:
    """The class whose ranks run several tests, with new ranks for each: a failed one ends alone."""

    class FreshRanks(base):
        world_size = 2
        poison_pill = False

        def setUp(self) -> None:
            type(self)._processes_spawned = False
            type(self).poison_pill = False
            super().setUp()

        def tearDown(self) -> None:
            super().tearDown()
            for process in type(self).processes:
                process.kill()
                process.join()
            type(self)._processes_spawned = False

    return FreshRanks
