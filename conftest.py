"""pytest configuration of all parts."""

import operator
import signal

pytest_plugins = [
    "testcluster.fixtures",  # a real Kubernetes, for the tests of any part
    "tests.stages",  # --stage, of `make test`
]

# pytest's importlib mode names a test module after its path and creates missing parent modules:
# `operator`, of the standard library, counts as missing as long as it has no `__path__`.
operator.__path__ = []  # type: ignore[attr-defined]

# A shell's background jobs ignore SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
