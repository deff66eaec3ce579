"""Floods of network clients do not affect the scheduler's Lease."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flyer.kube.gateway import certificates_of, renewed

from .test_process import free_port, kubeconfig, reached

__all__ = ["kubeconfig"]

ROOT = Path(__file__).parents[4]
FLOOD_SECONDS = 12
SILENT = 160


@pytest.fixture
def certificates(tmp_path):
    folder = tmp_path / "certificates"
    folder.mkdir()
    certs = certificates_of(renewed(None, ["localhost"], datetime.now(UTC)))
    for name, text in (
        ("ca.crt", certs.bundle), ("tls.crt", certs.certificate), ("tls.key", certs.key),
    ):  # fmt: skip
        (folder / name).write_text(text)
    return folder


async def start(module, *flags):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, stderr=asyncio.subprocess.DEVNULL
    )


async def stop(process):
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.mark.timeout(180)
async def test_floods_at_every_port_leave_the_lease_and_the_scheduler_alone(
    cluster, until, kubeconfig, certificates
):
    cluster.nodes("AA")
    plain, gateway, webhook, spare = (free_port() for _ in range(4))
    operator = await start(
        "flyer.kube", "--kubeconfig", str(kubeconfig), "--metrics-port", str(plain),
        "--gateway-port", str(gateway), "--gateway-host", "127.0.0.1", "--handlers", "false",
        # A stall of the loop that the defaults would survive ends the term here.
        "--lease-seconds", "4", "--lease-renew-seconds", "3", "--lease-retry-seconds", "0.3",
    )  # fmt: skip
    injection = await start(
        "flyer.kube.injection", "--port", str(webhook), "--metrics-port", str(spare),
        "--certificates-folder", str(certificates), "--host", "127.0.0.1",
    )  # fmt: skip
    try:
        await reached(operator, plain, "/leaderz")
        await reached(injection, spare, "/readyz")
        lease = cluster.store.get("leases", "flyer-operator", "fireflyer-system")["spec"]
        plan = {
            "silent": dict.fromkeys((plain, webhook, gateway), SILENT),
            "posts": [(webhook, "/inject", True), (plain, "/metrics", False), (gateway, "/", True)],
        }
        flood = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.hostile.flood", json.dumps(plan),
            cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        ends_at = asyncio.get_running_loop().time() + FLOOD_SECONDS
        renewed_at = {lease["renewTime"]}
        submitted = 0
        while asyncio.get_running_loop().time() < ends_at:
            lease_spec = cluster.store.get("leases", "flyer-operator", "fireflyer-system")["spec"]
            renewed_at.add(lease_spec["renewTime"])
            if len(renewed_at) == 6 and not submitted:
                cluster.submit("a", 2)
                submitted = len(renewed_at)
            await asyncio.sleep(0.05)
        await stop(flood)
        assert flood.stdout is not None
        counts = json.loads((await flood.stdout.read()).splitlines()[-1])
        assert counts["connections"] >= SILENT
        assert counts["posts"] >= 20
        after = cluster.store.get("leases", "flyer-operator", "fireflyer-system")["spec"]
        assert after["leaseTransitions"] == lease["leaseTransitions"]
        assert after["holderIdentity"] == lease["holderIdentity"]
        assert operator.returncode is None
        assert submitted, "the Lease was not renewed six times during the flood"
        await until(lambda: len([p for p in cluster.pods("a") if p["spec"].get("nodeName")]) == 2)
        await reached(operator, plain, "/healthz")
        await reached(injection, spare, "/readyz")
        assert injection.returncode is None
    finally:
        await stop(operator)
        await stop(injection)
