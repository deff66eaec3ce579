"""Runs test files of torch's sources with another backend in place of Gloo, and prints the results.

`python torch_files.py BACKEND FOLDER FILE...`: FOLDER is `test/distributed` of torch's sources, a
FILE is relative to it, or `FILE::CLASS`. BACKEND is `gloo`, which replaces nothing, `hfreduce`, or
`haiscale`: HFReduce, and `haiscale.fsdp.fully_shard` in place of torch's. Files that
`torch_files.json` lists as written for GPUs run on the CPU (`torch_on_cpu`). The last line is JSON:
passed, failed and skipped tests with the reasons. ONLY=WORD in the environment selects tests by
name. Ranks are forked, so that the replacements apply to all of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import unittest
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch_on_cpu
from torch_suite import Like

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTED = json.loads((Path(__file__).parent / "torch_files.json").read_text(encoding="utf-8"))
TEST_SECONDS = 60
ON_CPU_TEST_SECONDS = 150
GROUP_SECONDS = timedelta(seconds=50)


def replace_gloo(backend: str) -> None:
    """Replaces Gloo by `backend`, both by name and by the class of its groups."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if backend == "hfreduce":
        from hfreduce.torch import HFReduceBackend

        HFReduceBackend.create_device = staticmethod(c10d.ProcessGroupGloo.create_device)
    dist.Backend.default_device_backend_map["cpu"] = Like(backend)
    gloo_options = c10d.ProcessGroupGloo._Options

    def redirected(function: Any) -> Any:
        def called(*args: Any, **keywords: Any) -> Any:
            position = {"init_process_group": 0, "new_group": 2}.get(function.__name__)
            if position is not None and len(args) > position and isinstance(args[position], str):
                name = args[position].replace("gloo", backend)
                args = (*args[:position], name, *args[position + 1 :])
            for word, value in keywords.items():
                if isinstance(value, str):
                    keywords[word] = value.replace("gloo", backend)
            if isinstance(keywords.get("pg_options"), gloo_options):
                keywords["pg_options"] = None
            answer = function(*args, **keywords)
            return Like(answer) if answer == backend else answer

        return called

    for name in ("init_process_group", "new_group", "new_subgroups", "get_backend"):
        original = getattr(c10d, name)
        replacement = redirected(original)
        for module in [*sys.modules.values()]:
            if vars(module).get(name) is original:
                setattr(module, name, replacement)
    replace_constructor()


def replace_constructor() -> None:
    """Replaces the constructors of Gloo's groups and debug wrappers by HFReduce's."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    gloo_options = c10d.ProcessGroupGloo._Options

    class GlooReplacement:
        """Constructor of a group for tests that create a group of Gloo directly."""

        _Options = gloo_options
        create_device = staticmethod(c10d.ProcessGroupGloo.create_device)
        create_default_device = staticmethod(c10d.ProcessGroupGloo.create_default_device)

        def __new__(cls, store: Any, rank: int, size: int, *options: Any) -> Any:
            import torch
            from hfreduce._native import Membership, Settings
            from hfreduce.backend import HFReduceBackend

            timeout = getattr(options[0], "_timeout", options[0]) if options else GROUP_SECONDS
            members = Membership(rank, tuple(range(size)), size)
            settings = Settings.read(os.environ)
            group = dist.ProcessGroup(store, rank, size)
            kind = dist.ProcessGroup.BackendType.CUSTOM
            joined = HFReduceBackend.join(
                dist.PrefixStore("own", store), members, settings, timeout
            )
            group._set_default_backend(kind)
            group._register_backend(torch.device("cpu"), kind, joined)
            return group

    original_wrapper = c10d._create_process_group_wrapper
    wrapped = []

    def create_wrapper(group: Any, *args: Any, **keywords: Any) -> Any:
        """torch's debug wrapper gets a backend, which does not keep its group alive."""
        import torch

        wrapped.append(group)
        backend_of = group._get_backend(torch.device("cpu"))
        return original_wrapper(backend_of, *args, **keywords)

    dist._create_process_group_wrapper = create_wrapper
    dist.ProcessGroupGloo = GlooReplacement


def replace_fully_shard() -> None:
    """Replaces torch's `fully_shard` by haiscale's, whose collectives run in the background."""
    import torch.distributed.fsdp
    from haiscale.fsdp import fully_shard

    torch.distributed.fsdp.fully_shard = fully_shard


def fork_ranks() -> None:
    """Forks ranks where a test would spawn them."""
    import torch

    context = torch.multiprocessing.get_context("fork")
    torch.multiprocessing.get_context = lambda *_: context
    torch.multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    # A child makes a new thread pool at first use, and fails if two threads do so at the same time.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def load(path: Path, *, on_cpu: bool) -> Any:
    """The module of a test file."""
    name = path.stem
    # Some import others of their folder.
    sys.path.insert(0, str(path.parent))
    loader = None
    if on_cpu:
        torch_on_cpu.import_for_cpu(path.parent)
        loader = torch_on_cpu.CpuLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    # torch's hook refuses tests that are run by another script.
    vars(module).pop("load_tests", None)
    return module


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """The single tests of a suite of suites."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def selected(folder: Path, name: str) -> Iterator[unittest.TestCase]:
    """The tests of a file or of a class of it."""
    file, _, class_name = name.partition("::")
    module = load(folder / file, on_cpu=name in LISTED["for_gpus"])
    word = os.environ.get("ONLY", "")
    for test in cases(unittest.defaultTestLoader.loadTestsFromModule(module)):
        _, of_class, method = test.id().rsplit(".", 2)
        is_selected = word in test.id() and of_class == (class_name or of_class)
        if is_selected and f"{of_class}.{method}" not in LISTED["left_out"]:
            yield test


def main() -> None:
    backend, folder, files = sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]
    on_cpu = not set(files).isdisjoint(LISTED["for_gpus"])
    temporary = tempfile.gettempdir()
    seconds = ON_CPU_TEST_SECONDS if on_cpu else TEST_SECONDS
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": "4",
        "TEMP_DIR": temporary,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(seconds),
    }
    sys.path.insert(0, str(folder))
    fork_ranks()
    if backend != "gloo":
        replace_gloo("hfreduce")
    if on_cpu:
        torch_on_cpu.prepare()
    if backend == "haiscale":
        replace_fully_shard()
    suite = unittest.TestSuite(test for name in files for test in selected(folder, name))
    names = [test.id() for test in suite]
    result = unittest.TextTestRunner(sys.stderr, verbosity=2).run(suite)
    failed = {test.id(): text for test, text in [*result.failures, *result.errors]}
    skipped = {test.id(): why for test, why in result.skipped}
    passed = [name for name in names if name not in failed and name not in skipped]
    print(json.dumps({"passed": passed, "failed": failed, "skipped": skipped}))


if __name__ == "__main__":
    main()
