"""Access: credentials that are renewed, the server's certificate, and redirects."""

import contextlib
import datetime as dt
import json
import ssl
from types import SimpleNamespace

import pytest
from aiohttp import web
from flyer.kube.apiserver import Access, AccessError, Api, Limits, access, find_access
from flyer.kube.apiserver.errors import UnreachableError
from flyer.kube.apiserver.resources import NODES
from kubernetes.aio.config import incluster_config

from testcluster.pki import Authority

LIMITS = Limits(answer_seconds=5.0, call_seconds=0.2)
NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}


@contextlib.asynccontextmanager
async def serving(respond, context=None):
    """A server on the loopback with one response to everything; its port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", respond)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@contextlib.asynccontextmanager
async def node_server(pki, name="server"):
    """Responds over TLS, with the authorization of each request."""
    tokens = []

    async def respond(request):
        tokens.append(request.headers.get("Authorization"))
        return web.json_response(NODE)

    issued = Authority(pki).issue(name, name, hosts=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.certificate, issued.key)
    async with serving(respond, context) as port:
        yield port, tokens


@pytest.fixture
def account(tmp_path, monkeypatch):
    """A mounted service account."""
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text("first")
    return tmp_path


@pytest.fixture
def later(monkeypatch):
    """`later(seconds)`: moves the clock of the token's renewal."""
    passed = dt.timedelta()

    class Clock(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return dt.datetime.now(tz) + passed

    def move(seconds):
        nonlocal passed
        passed += dt.timedelta(seconds=seconds)

    clock = SimpleNamespace(datetime=Clock, timedelta=dt.timedelta)
    monkeypatch.setattr(incluster_config, "datetime", clock)
    return move


async def test_the_token_of_a_service_account_is_read_again(account, later, monkeypatch):
    async with node_server(account) as (port, tokens):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        async with Api(await find_access(), agent="test", limits=LIMITS) as api:
            assert await api.get(NODES, "n") == NODE
            (account / "token").write_text("second\n")
            await api.get(NODES, "n")
            later(61)
            await api.get(NODES, "n")
            assert tokens == ["bearer first", "bearer first", "bearer second"]
            (account / "token").unlink()
            later(61)
            with pytest.raises(UnreachableError, match="token"):
                await api.get(NODES, "n")
            (account / "token").write_text("third")
            await api.get(NODES, "n")
            assert tokens[3:] == ["bearer third"]


async def test_a_service_account_without_a_server_is_an_error(account, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(AccessError, match="Service host/port is not set"):
        await find_access()


async def test_a_server_with_another_authority_gets_no_request(tmp_path):
    own, other = tmp_path / "ours", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        Authority(folder)
    async with node_server(other) as (port, tokens):
        url = f"https://127.0.0.1:{port}"
        ca = Access(url, {"BearerToken": "Bearer secret"}, ssl_ca_cert=str(own / "ca.crt"))
        async with Api(ca, agent="test", limits=LIMITS) as api:
            with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
                await api.get(NODES, "n")
        assert not tokens


async def test_the_server_name_of_a_kubeconfig_is_verified(tmp_path):
    async with node_server(tmp_path) as (port, tokens):
        cluster = {
            "server": f"https://localhost:{port}",
            "certificate-authority": str(tmp_path / "ca.crt"),
            "tls-server-name": "127.0.0.1",
        }
        path = tmp_path / "config"
        path.write_text(
            json.dumps({
                "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "clusters": [{"name": "k", "cluster": cluster}],
                "users": [{"name": "u", "user": {"token": "secret"}}],
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            })
        )  # fmt: skip
        async with Api(await find_access(str(path)), agent="test", limits=LIMITS) as api:
            assert await api.get(NODES, "n") == NODE
        assert tokens == ["Bearer secret"]


async def test_a_redirect_takes_no_token_to_another_server():
    tokens = []

    async def elsewhere(request):
        tokens.append(request.headers.get("Authorization"))
        return web.json_response(NODE)

    async with serving(elsewhere) as other:

        async def respond(_request):
            raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{other}/api/v1/nodes/n")

        async with serving(respond) as port:
            token = {"BearerToken": "Bearer secret"}
            async with Api(Access(f"http://127.0.0.1:{port}", token), agent="test") as api:
                await api.get(NODES, "n")
    assert tokens == [None]


async def test_the_password_of_a_proxy_is_in_no_error():
    async def refuse(request):
        return web.Response(status=407)

    async with serving(refuse) as port:
        settings = Access(host="https://127.0.0.1:1")
        settings.proxy = f"http://bob:s3cret@127.0.0.1:{port}"
        async with Api(settings, agent="test", limits=LIMITS) as api:
            with pytest.raises(UnreachableError, match="ClientHttpProxyError") as excinfo:
                await api.get(NODES, "n")
    assert "s3cret" not in str(excinfo.value)


async def test_a_ca_that_is_missing_is_an_error_of_access(account):
    (account / "ca.crt").unlink(missing_ok=True)
    with pytest.raises(AccessError):
        await find_access()


async def test_the_client_package_uses_the_connections_of_the_operator():
    """Another version of it could have another hook than `_create_pool_manager`."""

    async def respond(request):
        return web.json_response(NODE)

    async with serving(respond) as port:
        settings = Access(host=f"http://127.0.0.1:{port}")
        async with Api(settings, agent="test", limits=LIMITS) as api:
            assert await api.get(NODES, "n") == NODE
            session = api._connections.pool_manager
            assert session.connector.limit == 0
            assert not session.trust_env
