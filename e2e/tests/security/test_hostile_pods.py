"""Pods that send false messages to the gateway only affect their own jobs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from flyer.engine import (
    GangStarted,
    LogObserved,
    ProgressReported,
    Released,
    Signal,
    StreamLost,
    StreamRestored,
    SuspendReceived,
)
from flyer.kube.apiserver.resources import PODS

from e2e.lib.gateway import SECONDS, STEPS

if TYPE_CHECKING:
    from e2e.lib.gateway import Control

# Images are built and loaded first, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

# While it trains, the last rank sends false messages to the gateway, with its pod's token and in
# place of its sidecar. It repeats them until they are received, because its sidecar reconnects.
LIES = """
import json, os, socket, ssl, sys, threading

def say(*lines):
    host, port, authority = sys.argv[1:]
    context = ssl.create_default_context(cadata=authority)
    hello = {"kind": "hello", "version": 1, "token": open("/token/token").read()}
    with socket.create_connection((host, int(port)), timeout=30) as plain:
        with context.wrap_socket(plain, server_hostname=host) as one:
            one.sendall(b"".join(json.dumps(line).encode() + b"\\n" for line in (hello, *lines)))
            for answer in map(json.loads, one.makefile()):
                if answer["kind"] in ("refusal", "acknowledgement"):
                    return answer.get("code", answer["kind"])

def lie():
    report = {"kind": "report", "revision": 1, "launcher": "running", "ranks_seen": 2, "output": 0}
    theirs = {"job": os.environ["FLYER_JOB"].replace("mine", "theirs"), "node_rank": 0, "rank": 0}
    for expected, lines in (
        ("acknowledgement", [{**report, **theirs, "suspended": True, "received": True}]),
        ("bad_rank", [{**report, **theirs, "end": {"code": 1, "rank": 0}}]),
        ("bad_rank", [{**report, **theirs, "given_up": {"rank": 0, "reason": "boom"}}]),
        ("flood", [{"kind": "beat"}] * 1000),
    ):
        for _ in range(50):
            try:
                if say(*lines) == expected:
                    break
            except OSError:
                if expected == "flood":
                    break  # the gateway closed the connection before the message was complete
    print("all false messages are sent", flush=True)

if os.environ["RANK"] == "5":
    threading.Thread(target=lie, daemon=True).start()
"""


async def test_false_messages_of_a_rank_affect_only_its_own_pod(control: Control) -> None:
    other_pods = await control.start("theirs", STEPS)
    await control.watch(other_pods, GangStarted, "theirs")
    address = (control.host, str(control.gateway.port), control.bundle)
    own_pods = await control.start("mine", LIES + STEPS, *address, token=True)
    await control.watch(own_pods, GangStarted, "mine")
    async with asyncio.timeout(SECONDS):
        while "all false messages are sent" not in control.logs(own_pods[2]):
            await asyncio.sleep(0.5)
    refused = {code: control.count(code) for code in ("unasked", "bad_rank", "flood", "replaced")}
    assert (refused["bad_rank"] or 0) >= 2, refused
    assert all(refused.values()), refused
    # Nothing of it became an event, but that its own job lost a stream and got it back.
    for event in control.events:
        if isinstance(event, StreamLost | StreamRestored):
            assert event.job == f"{control.namespace}/mine", event
        else:
            assert isinstance(event, GangStarted | ProgressReported | LogObserved), event

    # Its own sidecar is connected again, and both jobs obey requests.
    control.events.clear()
    for name in ("theirs", "mine"):
        await control.event(ProgressReported, name)
        job = f"{control.namespace}/{name}"
        control.gateway.signal(Signal(job, 1, time.time() + 60, "Preempted", "lab/other"))
        await control.event(SuspendReceived, name)
        await control.event(Released, name)
    for pod in (*other_pods, *own_pods):
        await control.api.delete(PODS, pod["metadata"]["name"], control.namespace, grace_seconds=1)
