"""Binds its MASTER_PORT as another `flyer` that looks for an unused port, then as a server."""

import os
import socket

port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            print("held:", error.strerror)
    socket.create_server(("127.0.0.1", port)).close()
