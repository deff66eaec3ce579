"""Rank 3 fails shortly after the ranks of another node reported a lost peer."""

import os
import sys
import time

if os.environ["RANK"] == "3" and "fail" in sys.argv:
    time.sleep(0.5)
    raise ValueError("the cause")
if os.environ["RANK"] == "3":
    time.sleep(0.5)
    os.kill(os.getppid(), 9)  # the node's supervisor, and so the node
    time.sleep(60)
if os.environ["RANK"] == "2":
    time.sleep(60)


class PeerLostError(Exception):
    """As a collective library raises it."""

    peer_lost = True


time.sleep(0.2)
raise PeerLostError("rank 3 is gone")
