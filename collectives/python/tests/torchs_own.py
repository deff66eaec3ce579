"""Runs the tests that torch has for its backends over a backend, and prints how each ended as JSON.

`python torchs_own.py BACKEND RANKS`. Ranks are forked, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from unittest import mock

TEST_SECONDS = 60


def suite(backend: str, ranks: int, folder: str) -> unittest.TestSuite:
    # Read where torch's tests are imported.
    os.environ |= {
        "BACKEND": backend,
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
    distributed_test.DistTestCases.backend_feature["plugin"] = {backend}

    class Own(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            fork = torch.multiprocessing.get_context("fork")
            with mock.patch.object(torch.multiprocessing, "get_context", return_value=fork):
                self._spawn_processes()

    return unittest.defaultTestLoader.loadTestsFromTestCase(Own)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tests = suite(sys.argv[1], int(sys.argv[2]), folder)
        names = [test.id().rpartition(".")[2] for test in tests]
        result = unittest.TextTestRunner(sys.stderr, verbosity=0).run(tests)
    failed = {
        test.id().rpartition(".")[2]: text for test, text in [*result.failures, *result.errors]
    }
    skipped = {test.id().rpartition(".")[2]: why for test, why in result.skipped}
    passed = [name for name in names if name not in failed and name not in skipped]
    print(json.dumps({"passed": passed, "failed": failed, "skipped": skipped}))


if __name__ == "__main__":
    main()
