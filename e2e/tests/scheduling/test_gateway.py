"""Gangs on real kubelets with only the gateway: real tokens, sidecars, launchers and logs.

The test acts as the scheduler (it creates and binds pods); everything else is the product.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

import pytest
from flyer.engine import (
    Failed,
    GangStarted,
    PodExited,
    ProgressReported,
    Released,
    Signal,
    SuspendReceived,
)
from flyer.kube.apiserver.resources import PODS
from flyer.kube.gateway import outcome_of

from e2e.lib.gateway import NODES, SECONDS, STEPS, TOKEN

if TYPE_CHECKING:
    from e2e.lib.gateway import Control

# Images are built and loaded first, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(600)

FAILING = """
import os, time
if os.environ["RANK"] == "5":
    raise ValueError("seven")
time.sleep(60)
"""
CONNECT = """
import json, socket, ssl, sys
host, port, path, authority = sys.argv[1:]
context = ssl.create_default_context(cadata=authority)
with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as tls:
    token = open(path).read()
    tls.sendall(json.dumps({"kind": "hello", "version": 1, "token": token}).encode() + b"\\n")
    print(json.loads(tls.makefile().readline())["code"])
"""


async def test_a_gang_starts_is_suspended_and_releases_its_nodes(control: Control) -> None:
    started_at = time.monotonic()
    pods = await control.start("gpt", STEPS)
    started = await control.watch(pods, GangStarted)
    print(f"created to running: {time.monotonic() - started_at:.1f} s")
    await control.event(ProgressReported)
    asked_at = time.time()
    signal = Signal(started.job, 1, asked_at + 60, "Preempted", "lab/other", uid=started.uid)
    control.gateway.signal(signal)
    await control.event(SuspendReceived)
    print(f"acknowledged after {(time.time() - asked_at) * 1000:.0f} ms")
    await control.event(Released)
    log = control.logs(pods[0])
    match = re.search(r"^rank 0 \| asked ([0-9.]+) Preempted by lab/other$", log, re.MULTILINE)
    assert match, log
    print(f"rank 0 knew after {(float(match[1]) - asked_at) * 1000:.0f} ms")
    for node_rank, member in enumerate(pods):
        address = (await control.api.get(PODS, pods[0]["metadata"]["name"], control.namespace))[
            "status"
        ]["podIP"]
        zone = NODES[node_rank][1]
        line = f"rank {2 * node_rank + 1} | at {address} {zone} node-a1,node-a2,node-b1"
        assert line in control.logs(member)
    for pod in pods:
        await control.api.delete(PODS, pod["metadata"]["name"], control.namespace, grace_seconds=5)


async def test_a_failing_rank_is_reported_with_its_traceback(control: Control) -> None:
    pods = await control.start("bad", FAILING)
    exited = await control.watch(pods, PodExited)
    assert exited.node == "node-b1"
    assert exited.outcome == Failed(1, "rank 5: ValueError: seven")
    log = control.logs(pods[2])
    assert "rank 5 | ValueError: seven" in log
    assert "rank 5 on node node-b1: exit status 1" in log
    pod = pods[2]["metadata"]["name"]
    for _ in range(int(SECONDS)):
        pod_object = await control.api.get(PODS, pod, control.namespace)
        if pod_object["status"]["phase"] == "Failed":
            break
        await asyncio.sleep(1)
    # The replacement for the sidecar's account has the same result.
    assert outcome_of(pod_object) == Failed(1, "rank 5: ValueError: seven")
    for item in pods:
        await control.api.delete(PODS, item["metadata"]["name"], control.namespace, grace_seconds=1)


async def test_pods_with_a_wrong_identity_are_refused(control: Control) -> None:
    """A token for the API server, and a valid token of a pod outside any gang."""
    paths = {
        "its-own": "/var/run/secrets/kubernetes.io/serviceaccount/token",
        "unknown-pod": "/token/token",
    }
    port = str(control.gateway.port)
    for name, path in paths.items():
        command = ["python3", "-c", CONNECT, control.host, port, path, control.bundle]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "nodeName": "node-a1",
                "restartPolicy": "Never",
                "tolerations": [{"operator": "Exists"}],
                "volumes": [{"name": "token", "projected": {"sources": [TOKEN]}}],
                "containers": [
                    {
                        "name": "main",
                        "image": "docker.io/fireflyer/train:test",
                        "command": command,
                        "volumeMounts": [{"name": "token", "mountPath": "/token"}],
                    }
                ],
            },
        }
        # Created by an administrator: the operator's account may only create pods of FlyerJobs.
        await asyncio.to_thread(control.cluster.apply, pod, namespace=control.namespace)
    # Neither is sent to the API server: both claim pods outside any gang.
    async with asyncio.timeout(SECONDS):
        while control.count("unknown_pod") != len(paths):
            await asyncio.sleep(0.2)
