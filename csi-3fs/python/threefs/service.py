"""One service as a process: ``python -m threefs.service KIND CONFIG.json [PARENT_PID]``.

The services are native; this module starts them. With a parent's process id the service dies
together with its parent, in every case. Kind `etcd` becomes the command of its configuration.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from threefs import _native

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM; the exit status is 1 if the service failed to start or to continue."""
    kind, config_path = arguments[0], Path(arguments[1])
    parent_pid = int(arguments[2]) if len(arguments) > 2 else 0
    if kind == "etcd":
        _execute(json.loads(config_path.read_text())["command"], parent_pid)
    try:
        _native.run_service(kind, config_path.read_text(), parent_pid)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 -- the supervisor shows this line
        return 1
    return 0


def _execute(command: list[str], parent_pid: int) -> NoReturn:
    """Become another program, which is killed when the parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)
    # Options of etcd are also read from variables, such as those for `etcdctl` of another cluster.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
    os.execve(command[0], command, variables)  # noqa: S606 -- no shell is wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
