"""Runs torch's tests of its backends over a backend, and prints the results as JSON.

`python torch_suite.py BACKEND RANKS [NAME...]`. Ranks are forked, so that torch is imported once.
torch's tests are skipped by the name of the backend: here every backend runs those of Gloo,
and the names of the profiler's events are expected of every backend.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from unittest import mock

TEST_SECONDS = 60


class Like(str):
    """The name of a backend that is also equal to Gloo's where a test compares names."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def suite(backend: str, ranks: int, folder: str, names: list[str]) -> unittest.TestSuite:
    # torch's tests read these at import, and skip what Gloo does not support.
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/rendezvous",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_SECONDS),
    }
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    common_distributed.TIMEOUT_OVERRIDE = {}
    distributed_test.BACKEND = Like(backend)
    # With this name torch skips tests that need eight ranks; it has no other effect.
    os.environ["BACKEND"] = "mpi"
    if backend not in distributed_test.PROFILING_SUPPORTED_BACKENDS:
        distributed_test.PROFILING_SUPPORTED_BACKENDS.append(backend)
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            fork = torch.multiprocessing.get_context("fork")
            with mock.patch.object(torch.multiprocessing, "get_context", return_value=fork):
                self._spawn_processes()

    if names:
        return unittest.TestSuite(Suite(name) for name in names)
    return unittest.defaultTestLoader.loadTestsFromTestCase(Suite)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tests = suite(sys.argv[1], int(sys.argv[2]), folder, sys.argv[3:])
        names = [test.id().rpartition(".")[2] for test in tests]
        result = unittest.TextTestRunner(sys.stderr, verbosity=2).run(tests)
    failed = {
        test.id().rpartition(".")[2]: text for test, text in [*result.failures, *result.errors]
    }
    skipped = {test.id().rpartition(".")[2]: why for test, why in result.skipped}
    passed = [name for name in names if name not in failed and name not in skipped]
    print(json.dumps({"passed": passed, "failed": failed, "skipped": skipped}))


if __name__ == "__main__":
    main()
