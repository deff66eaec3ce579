"""A process that holds a mount: `python holding.py`, with one JSON line for each request.

The process that starts a daemon must not have files of the mount open: between fork and exec the
child has them, too, and closing them would wait for the daemon that has not started yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class HeldMount:
    """The holding process, as tests use it."""

    def __init__(self, environment: dict[str, str], **options: Any) -> None:
        self.target = Path(options["target"])
        self.root: str = options["root"]
        self._holder = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.ready, self.pid = self._answer()

    def respawn(self) -> None:
        """Kill the daemon and start another one."""
        self._request("respawn")

    def signal(self, number: int) -> None:
        """Send the daemon a signal."""
        self._request("signal", number)

    def wait(self) -> int:
        """Wait for the daemon to exit; returns its status."""
        self._request("wait")
        status: int = self.ready["status"]
        return status

    def close(self) -> None:
        """Unmount, in any state of holder and daemon."""
        if self._holder.poll() is None:
            self._request("close")
            self._holder.wait(60)

    def _request(self, *request: Any) -> None:
        assert self._holder.stdin is not None
        self._holder.stdin.write(json.dumps(request) + "\n")
        self._holder.stdin.flush()
        self.ready, self.pid = self._answer()

    def _answer(self) -> tuple[dict[str, Any], int]:
        assert self._holder.stdout is not None
        line = self._holder.stdout.readline()
        assert line, "the holder has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["ready"], answer["pid"]


def start_mount(
    cluster_file: Path, root: str, folder: Path, number: int, **options: object
) -> HeldMount:
    """Mount in a folder for tests, which also has the daemon's log and state."""
    import threefs

    target = folder / f"mount-{number}"
    target.mkdir()
    package = str(Path(threefs.__file__).parent.parent)
    return HeldMount(
        {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])},
        cluster=str(cluster_file),
        root=root,
        target=str(target),
        state=str(folder / f"state-{number}"),
        log=str(folder / f"daemon-{number}.log"),
        **options,
    )


def main() -> None:
    from threefs.mount import Mount

    options = json.loads(sys.argv[1])
    for name in ("cluster", "target", "state", "log"):
        options[name] = Path(options[name])
    mount = Mount(**options)
    reply: dict[str, Any] = mount.ready
    while True:
        sys.stdout.write(json.dumps({"ready": reply, "pid": mount.process.pid}) + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        request = json.loads(line) if line else ["close"]
        try:
            if request[0] == "respawn":
                mount.respawn()
                reply = mount.ready
            elif request[0] == "signal":
                mount.process.send_signal(request[1])
            elif request[0] == "wait":
                reply = {"status": mount.process.wait(60)}
            else:
                mount.close()
                sys.stdout.write(json.dumps({"ready": {}, "pid": 0}) + "\n")
                return
        except BaseException as error:
            sys.stdout.write(json.dumps({"error": repr(error)}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
