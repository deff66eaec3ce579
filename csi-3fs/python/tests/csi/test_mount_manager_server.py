"""The socket of a mount manager, and signals."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any, cast

from threefs.csi.mount_manager.protocol import exchange
from threefs.csi.mount_manager.server import Server

if TYPE_CHECKING:
    from pathlib import Path


def test_a_signal_wakes_the_server_and_ends_it_only_if_it_was_closed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    signals, wakeup = socket.socketpair()
    server = Server(path, cast("Any", None))
    server.open()
    thread = threading.Thread(target=server.serve, args=(signals,), daemon=True)
    thread.start()
    for _ in range(3):
        wakeup.send(b"x")
        assert exchange(path, 60, op="nothing")["ok"] is False
    server.close()
    wakeup.send(b"x")
    thread.join(60)
    assert not thread.is_alive()


def test_a_server_that_was_closed_before_it_serves_ends(tmp_path: Path) -> None:
    signals, _wakeup = socket.socketpair()
    server = Server(tmp_path / "socket", cast("Any", None))
    server.open()
    server.close()
    server.serve(signals)
