"""One service as a process: ``python -m threefs.service KIND CONFIG.json [PARENT_PID]``.

The services are native; this module starts them. With a parent's process id the service dies
together with its parent, in every case.
"""

import sys
from pathlib import Path

from threefs import _native

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM; the exit status is 1 if the service failed to start or to continue."""
    kind, config_path = arguments[0], Path(arguments[1])
    parent_pid = int(arguments[2]) if len(arguments) > 2 else 0
    try:
        _native.run_service(kind, config_path.read_text(), parent_pid)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 -- the supervisor shows this line
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
