"""When a process of a test cluster counts as ended."""

import subprocess
import sys
import time
from pathlib import Path

from testcluster.processes import wait_gone

SECONDS = 60.0

# The main thread exits; the other thread continues until its input ends.
TWO_THREADS = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_first_thread_has_ended_still_has_its_ports() -> None:
    with subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/status")
        deadline = time.monotonic() + SECONDS
        while "State:\tZ" not in status.read_text():
            assert time.monotonic() < deadline, status.read_text()
            time.sleep(0.01)
        assert wait_gone([process.pid], 0.2) == [process.pid]
        assert process.stdin is not None
        process.stdin.close()
        assert wait_gone([process.pid], SECONDS) == []
