"""`flyer-operator` as a process: flags, probes, metrics, certificates, and shutdown."""

import asyncio
import base64
import contextlib
import json
import random
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from flyer.api import Phase
from flyer.kube.apiserver.token_reviews import TokenReviews
from flyer.kube.gateway import IdentityUnknownError, TokenRefusedError
from flyer.kube.services import certificates
from flyer.kube.services.certificates import CertificateManager
from flyer.kube.settings import parse_settings

from fakekube import Fault

GIVEN = set()


def free_port():
    """A port outside the ephemeral range, from which other tests' connections take ports."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first // 2, first)
        if port in GIVEN:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            GIVEN.add(port)
            return port


@pytest.fixture
def kubeconfig(tmp_path, cluster):
    path = tmp_path / "config"
    path.write_text(
        json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": cluster.server.url}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        })
    )  # fmt: skip
    return path


async def get(port, path):
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}{path}") as response,
        ):
            return response.status, await response.text()
    except aiohttp.ClientError:
        return 0, ""


async def reached(process, port, path):
    async with asyncio.timeout(60):
        while (await get(port, path))[0] != 200:
            if process.returncode is not None:
                errors = await process.stderr.read() if process.stderr else b""
                raise AssertionError(f"ended with {process.returncode}: {errors.decode()}")
            await asyncio.sleep(0.05)


async def test_the_operator_leads_creates_pods_serves_metrics_and_releases_the_lease(
    cluster, until, kubeconfig
):
    cluster.nodes("AA")
    cluster.store.create("pods", {"metadata": {"name": "me"}, "spec": {}}, "fireflyer-system")
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "flyer.kube", "--kubeconfig", str(kubeconfig),
        "--metrics-port", str(port), "--gateway-port", str(free_port()), "--pod-name", "me",
        "--gateway-host", "127.0.0.1", "--log-level", "info", "--handlers", "false",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await reached(process, port, "/readyz")
        await reached(process, port, "/leaderz")
        await reached(process, port, "/healthz")
        cluster.submit("a", 2)
        await until(lambda: len([p for p in cluster.pods("a") if p["spec"].get("nodeName")]) == 2)
        assert cluster.phase("a") is Phase.STARTING  # no sidecar connects here
        bundle = cluster.store.get("secrets", "flyer-certificates", "fireflyer-system")["data"]
        authority = base64.b64decode(bundle["ca.crt"]).decode()
        assert authority in json.dumps(cluster.pods("a")).replace("\\n", "\n")
        label = cluster.store.get("pods", "me", "fireflyer-system")["metadata"]["labels"]
        assert label == {"fireflyer.dev/leader": "true"}
        _, text = await get(port, "/metrics")
        for line in (
            'flyer_jobs{phase="Starting"} 1.0',
            "flyer_leader 1.0",
            "flyer_gang_nodes 2.0",
            'flyer_api_requests_total{code="201",resource="pods/binding",verb="create"} 2.0',
            'flyer_watch_age_seconds{resource="pods"}',
        ):
            assert line in text, line
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    for line in errors.decode().splitlines():
        assert {"time", "level", "msg"} <= json.loads(line).keys()
    lease = cluster.store.get("leases", "flyer-operator", "fireflyer-system")
    assert lease["spec"]["holderIdentity"] == ""


def test_settings_come_from_flags_and_from_the_environment(capsys):
    env = {"FLYER_LEASE_SECONDS": "9", "FLYER_INJECTION": "true", "FLYER_NAMESPACE": "ff"}
    settings = parse_settings(["--lease-seconds", "5"], env)
    assert (settings.lease_seconds, settings.injection, settings.namespace) == (5, True, "ff")
    assert settings.endpoint == "flyer-gateway.ff.svc:7443"
    assert "flyer-webhook.ff.svc" in settings.names
    assert settings.webhook_names == ("flyer-webhook.ff.svc", "flyer-webhook.ff.svc.cluster.local")
    usual = parse_settings([], {})
    assert (usual.lease_seconds, usual.renew, usual.retry) == (15, 10, 2)
    for env, word in (
        ({"FLYER_LEASE_SECONDS": "x"}, "FLYER_LEASE_SECONDS='x'"),
        ({"FLYER_INJECTION": "perhaps"}, "expected true or false"),
        ({"FLYER_LOG_LEVEL": "loud"}, "expected debug, info, warning or error"),
        ({"FLYER_LEASE_SECONDS": "1"}, "expected at least 2"),
        ({"FLYER_LEASE_RENEW_SECONDS": "15"}, "expected 0 < retry < renew < lease"),
    ):
        with pytest.raises(SystemExit) as raised:
            parse_settings([], env)
        assert raised.value.code == 2
        assert word in capsys.readouterr().err


async def test_a_used_port_ends_the_operator_with_a_message(cluster, kubeconfig):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "flyer.kube", "--kubeconfig", str(kubeconfig),
            "--metrics-port", str(port), "--gateway-port", str(free_port()),
            "--handlers", "false", stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert f"port {port} for probes and metrics is already in use" in errors.decode()


async def test_replicas_share_their_certificates(api_server, connect):
    names = ("flyer-gateway.fireflyer-system.svc",)
    keepers = [CertificateManager(connect(f"k{n}"), "fireflyer-system", names) for n in range(3)]
    served = []
    keepers[0].serve_with(served.append)
    refreshed = await asyncio.gather(*(keeper.refresh() for keeper in keepers))
    again = await asyncio.gather(*(keeper.refresh() for keeper in keepers))
    assert again[0] == again[1] == again[2]
    assert again[0] in refreshed
    assert served[-1] == again[0]
    before = len(api_server.faults.writes())
    await keepers[0].refresh()
    assert len(api_server.faults.writes()) == before


async def test_the_authorities_of_an_emptied_secret_are_restored(api_server, connect):
    keeper = CertificateManager(connect(), "fireflyer-system", ("x.svc",))
    before = await keeper.refresh()
    api_server.store.patch(
        "secrets", "flyer-certificates", {"data": None}, namespace="fireflyer-system"
    )
    assert await keeper.refresh() == before
    stored = api_server.store.get("secrets", "flyer-certificates", "fireflyer-system")
    assert base64.b64decode(stored["data"]["ca.crt"]).decode() in before.bundle


async def test_the_webhook_configuration_gets_the_ca_bundle(api_server, connect):
    hooks = [{"name": "injection.fireflyer.dev", "clientConfig": {"service": {"name": "w"}}}]
    value = {"metadata": {"name": "flyer-injection"}, "webhooks": hooks}
    api_server.store.create("mutatingwebhookconfigurations", value)
    keeper = CertificateManager(connect(), "fireflyer-system", ("x.svc",), webhook=("w.svc",))
    current = await keeper.refresh()
    stored = api_server.store.get("mutatingwebhookconfigurations", "flyer-injection")
    config = stored["webhooks"][0]["clientConfig"]
    assert base64.b64decode(config["caBundle"]).decode() == current.bundle
    assert config["service"] == {"name": "w"}
    mounted = api_server.store.get("secrets", "flyer-webhook-certificate", "fireflyer-system")
    assert mounted["data"].keys() == {"ca.crt", "tls.crt", "tls.key"}
    assert base64.b64decode(mounted["data"]["ca.crt"]).decode() == current.bundle
    assert base64.b64decode(mounted["data"]["tls.key"]).decode() != current.key


async def test_a_late_or_overwritten_webhook_configuration_gets_the_ca_bundle(
    api_server, connect, until, monkeypatch
):
    """An installer creates it after the operator starts, and may overwrite it."""
    monkeypatch.setattr(certificates, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.01)
    keeper = CertificateManager(connect(), "fireflyer-system", ("x.svc",), webhook=("w.svc",))
    running = asyncio.create_task(keeper.run())
    await keeper.ready.wait()
    hooks = [{"name": "injection.fireflyer.dev", "clientConfig": {"service": {"name": "w"}}}]
    value = {"metadata": {"name": "flyer-injection"}, "webhooks": hooks}
    api_server.store.create("mutatingwebhookconfigurations", value)

    def reported():
        stored = api_server.store.get("mutatingwebhookconfigurations", "flyer-injection")
        return "caBundle" in stored["webhooks"][0]["clientConfig"]

    await until(reported)
    api_server.store.patch("mutatingwebhookconfigurations", "flyer-injection", {"webhooks": hooks})
    await until(reported)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_identity_of_a_token_is_decided_only_by_the_api_server(api_server, connect):
    store, tokens = api_server.store, api_server.tokens
    pod = store.create("pods", {"metadata": {"name": "p"}, "spec": {}}, "default")
    reviews = TokenReviews(connect(call_seconds=0.2))
    identity = await reviews.review(tokens.issue("default", pod="p"))
    assert (identity.namespace, identity.name) == ("default", "p")
    assert identity.uid == pod["metadata"]["uid"]
    for token in (
        "forged",
        tokens.issue("default", pod="p", audiences=("api",)),
        tokens.issue("default"),  # of no pod
    ):
        with pytest.raises(TokenRefusedError) as raised:
            await reviews.review(token)
        assert token not in str(raised.value)
    api_server.faults.add(Fault("refuse", code=500, resource="tokenreviews", times=100))
    with pytest.raises(IdentityUnknownError):
        await reviews.review("x")
