"""SIGTERM while `flyer-operator` is still importing."""

import subprocess
import sys

# The process gets SIGTERM while it imports the operator's module.
ENDED_EARLY = """
import os, signal, sys

class Terminate:
    def find_spec(self, name, *_):
        if name == "flyer.kube.__main__":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Terminate())
from flyer.kube.start import main
main()
sys.exit(3)
"""


def test_sigterm_before_the_imports_ends_the_operator_immediately():
    result = subprocess.run(
        [sys.executable, "-c", ENDED_EARLY], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_nothing_of_the_operator_is_imported_before():
    script = "import flyer.kube.start, sys; print('flyer.kube.__main__' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "False\n"
