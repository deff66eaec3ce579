"""Tickets for node plugins: who gets one, over TLS, against an API server that reviews tokens."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import socket
import ssl
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from threefs.csi.errors import (
    CsiError,
    FailedPrecondition,
    InvalidArgument,
    Missing,
    NoPermission,
    Unreachable,
)
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.tickets.issuer_client import METHOD, SERVICE, TOKENS, IssuerClient
from threefs.csi.tickets.issuer_server import RequestSlots, TlsFiles, serve_issuer
from threefs.csi.tickets.kubernetes import ApiServer
from threefs.csi.tickets.review import PodName, Policy
from threefs.csi.volumes.volume_id import VolumeId

from .api_server import DRIVER_NAME, DRIVER_NAMESPACE, FakeApiServer, pod_path
from .driver import Driver, Mode, capability, publish_request, sealed, stage_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MINE, THEIRS = "v1:default:/volumes/mine", "v1:default:/volumes/theirs"


@dataclass
class Cluster:
    """An API server with two tenants, the issuer, and the node plugin of node-a."""

    api: FakeApiServer
    driver: Driver
    client: IssuerClient
    folder: Path
    seals: list[dict[str, Any]]

    def issue(self, volume: str, pod_token: str) -> Any:
        return self.client.issue(VolumeId.parse(volume), tokens(pod_token))

    def refused(self, volume: str, pod_token: str, kind: type[CsiError] = NoPermission) -> str:
        before = len(self.seals)
        with pytest.raises(kind) as caught:
            self.issue(volume, pod_token)
        assert len(self.seals) == before, "nothing was sealed"
        return caught.value.message

    def node_token(self, token: str) -> None:
        self.client.token_file.write_text(token)


def tokens(token: str, audience: str = "3fs") -> dict[str, str]:
    expiry = {"token": token, "expirationTimestamp": "2031-01-01T00:00:00Z"}
    return {TOKENS: json.dumps({audience: expiry})}


def named(pod: dict[str, Any]) -> dict[str, str]:
    """As the kubelet names a pod in a publish request."""
    parts = ("namespace", "name", "uid")
    return {f"csi.storage.k8s.io/pod.{part}": pod["metadata"][part] for part in parts}


def certificate(folder: Path, name: str = "localhost") -> None:
    """`tls.crt`, `tls.key`, and `ca.crt`, which is the same certificate."""
    folder.mkdir(exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    (folder / "tls.crt").write_bytes(pem)
    (folder / "ca.crt").write_bytes(pem)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "tls.key").write_bytes(private)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    api = FakeApiServer()
    seals: list[dict[str, Any]] = []

    def seal(key_file: str, **fields: Any) -> str:
        seals.append(fields)
        return sealed(key_file, **fields)

    controller = Driver(tmp_path / "controller")
    controller.create("mine")
    controller.create("theirs")
    controller.key_issuer._seal = seal
    certificate(tmp_path / "tls")
    server = serve_issuer(
        "127.0.0.1:0",
        TlsFiles(tmp_path / "tls"),
        controller.key_issuer,
        ApiServer("127.0.0.1", api.port, token_file=api.token_file(tmp_path)),
        Policy(DRIVER_NAMESPACE, "threefs-csi-node", DRIVER_NAME),
        controller.metrics,
    )
    token_file = tmp_path / "token"
    token_file.write_text(api.add_node_plugin("node-a"))
    client = IssuerClient(f"localhost:{server.port}", tmp_path / "tls" / "ca.crt", token_file)
    for tenant, volume in (("a", MINE), ("b", THEIRS)):
        api.add_claim(tenant, "claim", volume)
        api.add_pod(tenant, "pod", "node-a", ("claim",))
    yield Cluster(api, controller, client, tmp_path, seals)
    server.stop(0.0)
    controller.close()
    api.close()


def test_a_pods_volume_gets_a_ticket_for_its_inode(cluster: Cluster) -> None:
    issued = cluster.issue(MINE, cluster.api.issue("a", "pod"))
    [fields] = cluster.seals
    inode = cluster.driver.files.stat("/volumes/mine").inode
    assert (fields["directory"], fields["path"]) == (inode, "/volumes/mine")
    assert (fields["node"], fields["read_only"]) == ("node-a", False)
    assert issued.expires_unix_s == fields["expires_unix_s"] == cluster.driver.wall + 7200
    assert (issued.mgmtd, issued.meta) == (("a:1",), "a:2")
    assert "ticket" not in repr(issued)


def test_a_volume_of_another_tenant_is_refused(cluster: Cluster) -> None:
    message = cluster.refused(THEIRS, cluster.api.issue("a", "pod"))
    assert f"pod `pod` mounts no claim that is bound to volume `{THEIRS}`" in message


def test_the_volume_is_what_both_claim_and_volume_say(cluster: Cluster) -> None:
    """A claim that names another tenant's PersistentVolume is not bound to it."""
    theirs = cluster.api.objects["/api/v1/namespaces/b/persistentvolumeclaims/claim"]
    forged, _ = cluster.api.add_claim("a", "forged", "v1:default:/volumes/none")
    forged["spec"]["volumeName"] = theirs["spec"]["volumeName"]
    cluster.api.add_pod("a", "thief", "node-a", ("forged",))
    assert "no claim" in cluster.refused(THEIRS, cluster.api.issue("a", "thief"))


def test_a_volume_of_another_driver_with_that_handle_is_refused(cluster: Cluster) -> None:
    cluster.api.add_claim("a", "other", THEIRS, driver="nfs.csi.k8s.io")
    cluster.api.add_pod("a", "thief", "node-a", ("other",))
    cluster.refused(THEIRS, cluster.api.issue("a", "thief"))


def test_an_ephemeral_claim_must_have_been_made_for_the_pod(cluster: Cluster) -> None:
    made, _ = cluster.api.add_claim("a", "p-scratch", MINE)
    volumes = [{"name": "scratch", "ephemeral": {}}]
    pod = cluster.api.add_pod("a", "p", "node-a", volumes=volumes)
    token = cluster.api.issue("a", "p")
    cluster.refused(MINE, token)
    made["metadata"]["ownerReferences"] = [{"controller": True, "uid": pod["metadata"]["uid"]}]
    cluster.issue(MINE, token)


def test_tokens_that_are_not_the_pods_are_refused(cluster: Cluster) -> None:
    api = cluster.api
    gone = api.issue("a", "pod")
    unbound = api.issue("a", "")
    for token, words in (
        ("forged", "not valid for audience"),
        ("x" * 20_000, "not valid for audience"),
        (api.issue("a", "pod", audiences=("https://kubernetes.default.svc",)), "not valid for"),
        (unbound, "not bound to a pod"),
    ):
        assert words in cluster.refused(MINE, token)
    # Made anew under its name: another pod.
    api.add_pod("a", "pod", "node-a", ("claim",))
    assert "not valid for audience" in cluster.refused(MINE, gone)
    api.knows_audiences = False
    assert "not valid for audience" in cluster.refused(MINE, api.issue("a", "pod"))


def test_a_pod_of_another_node_or_one_that_has_ended_is_refused(cluster: Cluster) -> None:
    api = cluster.api
    pod = api.add_pod("a", "far", "node-b", ("claim",))
    assert "not on the node" in cluster.refused(MINE, api.issue("a", "far"))
    pod["spec"]["nodeName"] = ""
    assert "is not assigned to a node" in cluster.refused(MINE, api.issue("a", "far"))
    for phase in ("Succeeded", "Failed"):
        api.objects[pod_path("a", "pod")]["status"]["phase"] = phase
        assert phase in cluster.refused(MINE, api.issue("a", "pod"))


def test_only_node_plugins_are_answered(cluster: Cluster) -> None:
    """A tenant may make tokens of its own pods for any audience, and reach the port."""
    api = cluster.api
    token = api.issue("a", "pod")
    for other in (
        token,
        "forged",
        api.add_node_plugin("node-a", namespace="a"),
        api.issue(DRIVER_NAMESPACE, "threefs-csi-node-node-a", "threefs-csi-controller"),
        api.issue(DRIVER_NAMESPACE, "", "threefs-csi-node"),
    ):
        cluster.node_token(other)
        cluster.refused(MINE, token)
    cluster.node_token(api.add_node_plugin("node-a"))
    cluster.issue(MINE, token)


def test_a_claim_for_readers_gets_a_read_only_ticket(cluster: Cluster) -> None:
    for modes, read_only in (
        (("ReadOnlyMany",), True),
        (("ReadOnlyMany", "ReadWriteMany"), False),
    ):
        cluster.api.add_claim("a", "claim", MINE, modes=modes)
        cluster.issue(MINE, cluster.api.issue("a", "pod"))
        assert cluster.seals[-1]["read_only"] is read_only


def test_volumes_that_do_not_exist_and_inline_ones_are_refused(cluster: Cluster) -> None:
    api = cluster.api
    for volume, kind in (
        ("v1:default:/volumes/gone", Missing),
        ("v1:other:/volumes/mine", InvalidArgument),
        ("v1:default:/inline/0123/csi-1", NoPermission),
    ):
        api.add_claim("a", "claim", volume)
        cluster.refused(volume, api.issue("a", "pod"), kind)
    # A directory without a quota marks nothing.
    cluster.driver.files._entry("/volumes/mine").limits = None
    api.add_claim("a", "claim", MINE)
    message = cluster.refused(MINE, api.issue("a", "pod"), FailedPrecondition)
    assert "not a directory with a quota" in message


def test_what_the_api_server_cannot_say_is_not_guessed(cluster: Cluster) -> None:
    token = cluster.api.issue("a", "pod")
    for status in (500, 403, 429):
        cluster.api.fail = status
        assert str(status) in cluster.refused(MINE, token, Unreachable)
    cluster.api.close()
    assert "does not answer" in cluster.refused(MINE, token, Unreachable)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"volume": 1, "node_token": "a", "pod_token": "b"}',
        b'{"volume": "v1:default:/volumes/mine", "node_token": "", "pod_token": "b"}',
        b'{"volume": "v1:default:/../etc", "node_token": "a", "pod_token": "b"}',
        b'{"volume": "v1:default:/volumes/mine", "node_token": "a", "ticket": "b"}',
        b'{"volume": "v1:default:/volumes/mine", "node_token": "a", "ticket": "b", "pods": [[1]]}',
        b'{"volume": "v1:default:/volumes/mine", "node_token": "a", "ticket": "b", "pods": ["a"]}',
        b"[" * 50_000,
        b"x" * 100_000,
    ],
)
def test_a_request_that_is_none_is_refused_before_any_review(cluster: Cluster, raw: bytes) -> None:
    ca = cluster.client.ca_file.read_bytes()
    with grpc.secure_channel(cluster.client.address, grpc.ssl_channel_credentials(ca)) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        with pytest.raises(grpc.RpcError) as caught:
            call(raw, timeout=30)
    refused: Any = caught.value
    assert refused.code().name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
    assert cluster.api.asked == []


def test_connections_that_say_nothing_keep_nobody_waiting(cluster: Cluster) -> None:
    """Without TLS, after TLS, and calls whose request never comes, several on a connection."""
    host, _, port = cluster.client.address.rpartition(":")
    ca = cluster.client.ca_file
    trust = ssl.create_default_context(cafile=str(ca))
    trust.set_alpn_protocols(["h2"])
    credentials = grpc.ssl_channel_credentials(ca.read_bytes())
    never = threading.Event()

    def nothing() -> Iterator[bytes]:
        never.wait()
        yield from ()

    with ExitStack() as stack:
        stack.callback(never.set)
        for number in range(160):
            plain = stack.enter_context(socket.create_connection((host, int(port))))
            if number % 2:
                stack.enter_context(trust.wrap_socket(plain, server_hostname=host))
        calls = []
        for number in range(40):
            options = [("grpc.use_local_subchannel_pool", 1), ("test.number", number)]
            channel = grpc.secure_channel(cluster.client.address, credentials, options)
            stack.enter_context(channel)
            call = channel.stream_unary(f"/{SERVICE}/{METHOD}", None, None)
            calls += [call.future(nothing(), wait_for_ready=True) for _ in range(4)]
            grpc.channel_ready_future(channel).result(60)
        for tenant, volume in (("a", MINE), ("b", THEIRS)) * 4:
            cluster.issue(volume, cluster.api.issue(tenant, "pod"))
        for call in calls:
            call.cancel()


def test_one_address_has_its_share_of_places_alone() -> None:
    slots = RequestSlots(total=8, per_address=3)
    releases = [slots.acquire("ipv4:10.0.0.1:4000") for _ in range(3)]
    assert slots.acquire("ipv4:10.0.0.1:5000") is None
    assert slots.acquire("ipv6:%5B::1%5D:5000") is not None
    for free in releases:
        assert free is not None
        free()
    others = [slots.acquire(f"ipv4:10.0.1.{number}:1") for number in range(9)]
    assert [free is not None for free in others] == [True] * 7 + [False] * 2


def test_a_node_plugin_trusts_the_issuers_certificate_alone(cluster: Cluster) -> None:
    certificate(cluster.folder / "other")
    client = replace(cluster.client, ca_file=cluster.folder / "other" / "ca.crt")
    with pytest.raises(Unreachable):
        client.issue(VolumeId.parse(MINE), tokens(cluster.api.issue("a", "pod")))
    assert cluster.api.asked == []


def test_a_renewed_certificate_is_used_without_a_restart(cluster: Cluster) -> None:
    certificate(cluster.folder / "tls")
    cluster.issue(MINE, cluster.api.issue("a", "pod"))


# The node plugin with an issuer


@pytest.fixture
def node(cluster: Cluster, tmp_path: Path) -> Iterator[Driver]:
    """A node without the key: its tickets come from the issuer, for the same tree."""
    node = Driver(tmp_path / "node", files=cluster.driver.files, issuer=cluster.client)
    yield node
    node.close()


def published(
    cluster: Cluster, pod: str = "pod", path: str = "/k/pod", **more: Any
) -> csi.NodePublishVolumeRequest:
    context = tokens(cluster.api.issue("a", pod)) | named(cluster.api.objects[pod_path("a", pod)])
    return publish_request(MINE, path, volume_context=context, **more)


def targets(driver: Driver) -> list[str]:
    return sorted(mounted.target for mounted in driver.mount_manager.state()[0])


def test_a_volume_is_mounted_when_the_pods_token_is_there(cluster: Cluster, node: Driver) -> None:
    for _ in range(2):
        node.call(stage_request(MINE))
    assert targets(node) == []
    assert cluster.seals == []
    for _ in range(2):
        node.call(published(cluster))
    assert targets(node) == ["/k/pod", "/k/stage"]
    assert len(cluster.seals) == 1
    stats = csi.NodeGetVolumeStatsRequest(volume_id=MINE, volume_path="/k/pod")
    assert not node.call(stats).volume_condition.abnormal
    node.call(csi.NodeUnpublishVolumeRequest(volume_id=MINE, target_path="/k/pod"))
    node.call(csi.NodeUnstageVolumeRequest(volume_id=MINE, staging_target_path="/k/stage"))
    assert targets(node) == []
    assert list((node.folder / "tickets").iterdir()) == []


def test_without_the_pods_token_nothing_is_mounted(cluster: Cluster, node: Driver) -> None:
    code, words = node.refused(publish_request(MINE))
    assert (code, "tokenRequests" in words) == ("FAILED_PRECONDITION", True)
    stolen = publish_request(THEIRS, volume_context=tokens(cluster.api.issue("a", "pod")))
    assert node.refused(stolen)[0] == "PERMISSION_DENIED"
    assert targets(node) == []
    assert cluster.seals == []


def test_a_ticket_is_renewed_at_half_of_its_time(cluster: Cluster, node: Driver) -> None:
    node.call(published(cluster))
    [folder] = (node.folder / "tickets").iterdir()
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    # The folder's group is the daemon's once the mount manager has it; nobody else reads anything.
    assert modes == {"ticket": 0o640, "cluster.json": 0o640, "pods.json": 0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    for passed, seals in ((3500.0, 1), (200.0, 2), (3500.0, 2), (200.0, 3)):
        passes(cluster, node, passed)
        node.node.renew()
        assert len(cluster.seals) == seals
    assert {seal["directory"] for seal in cluster.seals} == {cluster.seals[0]["directory"]}
    # A second pod asks with its own token, if it is due.
    passes(cluster, node, 3700.0)
    cluster.api.add_pod("a", "second", "node-a", ("claim",))
    node.call(published(cluster, "second", "/k/second"))
    assert len(cluster.seals) == 4


def passes(cluster: Cluster, node: Driver, seconds: float) -> None:
    """Time goes by, for the issuer and the node."""
    node.wall += seconds
    cluster.driver.wall += seconds


def refusals(node: Driver) -> float:
    counted = node.metrics.registry.get_sample_value(
        "threefs_csi_tickets_total", {"result": "refused"}
    )
    return counted or 0.0


def test_a_valid_ticket_outlives_an_issuer_that_is_away(
    cluster: Cluster, node: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    node.call(published(cluster))
    cluster.api.fail = 500
    passes(cluster, node, 7000.0)
    node.node.renew()
    node.call(published(cluster))
    assert refusals(node) == 2
    assert "ticket not renewed" in "".join(capfd.readouterr())
    passes(cluster, node, 300.0)
    node.node.renew()
    assert "ticket expired" in "".join(capfd.readouterr())
    assert node.refused(published(cluster))[0] == "UNAVAILABLE"
    # It is genuine still, and its pod is there.
    cluster.api.fail = 0
    node.node.renew()
    assert len(cluster.seals) == 2


def test_a_ticket_is_renewed_as_long_as_one_of_its_pods_is_there(
    cluster: Cluster, node: Driver
) -> None:
    api = cluster.api
    api.add_pod("a", "second", "node-a", ("claim",))
    node.call(published(cluster))
    node.call(published(cluster, "second", "/k/second"))
    del api.objects[pod_path("a", "pod")]
    node.call(csi.NodeUnpublishVolumeRequest(volume_id=MINE, target_path="/k/pod"))
    passes(cluster, node, 3700.0)
    node.node.renew()
    assert len(cluster.seals) == 2
    # The node lies on: it has it mounted, and no pod that mounts it.
    api.objects[pod_path("a", "second")]["status"]["phase"] = "Succeeded"
    passes(cluster, node, 3700.0)
    node.node.renew()
    assert (len(cluster.seals), refusals(node)) == (2, 1)


def test_a_renewal_needs_a_genuine_ticket_of_this_node_and_volume(cluster: Cluster) -> None:
    api, client = cluster.api, cluster.client
    mine = VolumeId.parse(MINE)
    pod = api.objects[pod_path("a", "pod")]["metadata"]
    pods = [PodName("a", "pod", pod["uid"])]
    ticket = cluster.issue(MINE, api.issue("a", "pod")).ticket
    client.renew(mine, ticket, pods)
    fields = json.loads(ticket)
    theirs = cluster.driver.files.stat("/volumes/theirs").inode
    seals = len(cluster.seals)
    for text, names, kind in (
        ("ffticket1:00:00", pods, NoPermission),
        (json.dumps(fields | {"node": "node-b"}), pods, NoPermission),
        (json.dumps(fields | {"directory": theirs}), pods, FailedPrecondition),
        (ticket, [], InvalidArgument),
        (ticket, [PodName("a", "pod", "another uid")], NoPermission),
        (ticket, [PodName("b", "pod", pod["uid"])], NoPermission),
        (ticket, [PodName("a", "../../b/pods/pod", pod["uid"])], NoPermission),
    ):
        with pytest.raises(kind):
            client.renew(mine, text, names)
    # A ticket for one volume is none for another, whose pods are on this node as well.
    other = api.objects[pod_path("b", "pod")]["metadata"]
    with pytest.raises(FailedPrecondition):
        client.renew(VolumeId.parse(THEIRS), ticket, [PodName("b", "pod", other["uid"])])
    cluster.node_token(api.issue("a", "pod"))
    with pytest.raises(NoPermission):
        client.renew(mine, ticket, pods)
    assert len(cluster.seals) == seals


def test_no_ticket_is_renewed_whose_claim_or_volume_is_gone(cluster: Cluster) -> None:
    api, mine = cluster.api, VolumeId.parse(MINE)
    pods = [PodName("a", "pod", api.objects[pod_path("a", "pod")]["metadata"]["uid"])]
    ticket = cluster.issue(MINE, api.issue("a", "pod")).ticket
    # Deleted and made again under its name, by the same tenant: another directory.
    cluster.driver.call(csi.DeleteVolumeRequest(volume_id=MINE))
    with pytest.raises(Missing):
        cluster.client.renew(mine, ticket, pods)
    cluster.driver.create("mine")
    with pytest.raises(FailedPrecondition, match="deleted and recreated"):
        cluster.client.renew(mine, ticket, pods)
    fresh = cluster.issue(MINE, api.issue("a", "pod")).ticket
    cluster.client.renew(mine, fresh, pods)
    seals = len(cluster.seals)
    del api.objects["/api/v1/namespaces/a/persistentvolumeclaims/claim"]
    with pytest.raises(NoPermission, match="no claim"):
        cluster.client.renew(mine, fresh, pods)
    assert len(cluster.seals) == seals


def test_a_claim_of_one_node_is_taken_when_its_volume_is_mounted(
    cluster: Cluster, node: Driver
) -> None:
    one = capability(Mode.SINGLE_NODE_WRITER)
    cluster.driver.files.claim("/volumes/mine", "node-b")
    code, words = node.refused(published(cluster, volume_capability=one))
    assert (code, "node-b" in words) == ("FAILED_PRECONDITION", True)
    assert targets(node) == []
    cluster.driver.files.unclaim("/volumes/mine", "node-b")
    node.call(published(cluster, volume_capability=one))
    assert cluster.driver.files.claim_of("/volumes/mine") == ("node-a", 1)
    node.call(csi.NodeUnpublishVolumeRequest(volume_id=MINE, target_path="/k/pod"))
    node.call(csi.NodeUnstageVolumeRequest(volume_id=MINE, staging_target_path="/k/stage"))
    assert cluster.driver.files.claim_of("/volumes/mine") is None


def test_tickets_that_ended_unused_are_removed(cluster: Cluster, node: Driver) -> None:
    node.tickets.issue(VolumeId.parse(MINE), tokens(cluster.api.issue("a", "pod")))
    node.tickets.remove_expired([])
    assert len(list((node.folder / "tickets").iterdir())) == 1
    node.wall += 7300.0
    node.tickets.remove_expired([MINE])
    assert len(list((node.folder / "tickets").iterdir())) == 1
    node.tickets.remove_expired([])
    assert list((node.folder / "tickets").iterdir()) == []


def test_tokens_are_in_no_log(
    cluster: Cluster, node: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    token = cluster.api.issue("a", "pod")
    node.call(publish_request(MINE, volume_context=tokens(token)))
    node.refused(publish_request(THEIRS, "/k/2", "/k/stage2", volume_context=tokens(token)))
    said = "".join(capfd.readouterr())
    assert "ticket issued" in said
    assert token not in said
    assert cluster.client.token_file.read_text() not in said
