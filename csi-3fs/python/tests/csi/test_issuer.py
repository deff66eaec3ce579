"""Tickets for node plugins: checks of the issuer, over TLS, with an API server."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from threefs.csi.errors import (
    FailedPrecondition,
    InvalidArgument,
    Missing,
    NoPermission,
    Unreachable,
)
from threefs.csi.tickets.issuer_client import METHOD, SERVICE
from threefs.csi.tickets.issuer_server import RequestSlots
from threefs.csi.volumes.volume_id import VolumeId

from .api_server import DRIVER_NAMESPACE, pod_path
from .issuer import MINE, THEIRS, Cluster, certificate, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_pods_volume_gets_a_ticket_for_its_inode(cluster: Cluster) -> None:
    issued = cluster.issue(MINE, cluster.api.issue("a", "pod"))
    [fields] = cluster.seals
    inode = cluster.driver.files.stat("/volumes/mine").inode
    assert (fields["directory"], fields["path"]) == (inode, "/volumes/mine")
    assert (fields["node"], fields["read_only"]) == ("node-a", False)
    assert issued.expires_unix_s == fields["expires_unix_s"] == cluster.driver.wall + 7200
    assert (issued.mgmtd, issued.meta) == (("a:1",), ("a:2",))
    assert "ticket" not in repr(issued)


def test_a_volume_of_another_tenant_is_refused(cluster: Cluster) -> None:
    message = cluster.refused(THEIRS, cluster.api.issue("a", "pod"))
    assert f"pod `pod` mounts no claim that is bound to volume `{THEIRS}`" in message


def test_claim_and_volume_must_name_each_other(cluster: Cluster) -> None:
    """A claim that names another tenant's PersistentVolume is not bound to it."""
    other_claim = cluster.api.objects["/api/v1/namespaces/b/persistentvolumeclaims/claim"]
    forged, _ = cluster.api.add_claim("a", "forged", "v1:default:/volumes/none")
    forged["spec"]["volumeName"] = other_claim["spec"]["volumeName"]
    cluster.api.add_pod("a", "thief", "node-a", ("forged",))
    assert "no claim" in cluster.refused(THEIRS, cluster.api.issue("a", "thief"))


def test_a_volume_of_another_driver_with_that_handle_is_refused(cluster: Cluster) -> None:
    cluster.api.add_claim("a", "other", THEIRS, driver="nfs.csi.k8s.io")
    cluster.api.add_pod("a", "thief", "node-a", ("other",))
    cluster.refused(THEIRS, cluster.api.issue("a", "thief"))


def test_an_ephemeral_claim_must_belong_to_the_pod(cluster: Cluster) -> None:
    claim, _ = cluster.api.add_claim("a", "p-scratch", MINE)
    volumes = [{"name": "scratch", "ephemeral": {}}]
    pod = cluster.api.add_pod("a", "p", "node-a", volumes=volumes)
    token = cluster.api.issue("a", "p")
    cluster.refused(MINE, token)
    claim["metadata"]["ownerReferences"] = [{"controller": True, "uid": pod["metadata"]["uid"]}]
    cluster.issue(MINE, token)


def test_tokens_that_are_not_the_pods_are_refused(cluster: Cluster) -> None:
    api = cluster.api
    expired = api.issue("a", "pod")
    unbound = api.issue("a", "")
    for token, words in (
        ("forged", "not valid for audience"),
        ("x" * 20_000, "not valid for audience"),
        (api.issue("a", "pod", audiences=("https://kubernetes.default.svc",)), "not valid for"),
        (unbound, "not bound to a pod"),
    ):
        assert words in cluster.refused(MINE, token)
    # Recreated under the same name: another pod.
    api.add_pod("a", "pod", "node-a", ("claim",))
    assert "not valid for audience" in cluster.refused(MINE, expired)
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
    """A tenant can request tokens of its pods for any audience, and can reach the port."""
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
    # A directory without a quota cannot have a ticket.
    cluster.driver.files._entry("/volumes/mine").limits = None
    api.add_claim("a", "claim", MINE)
    message = cluster.refused(MINE, api.issue("a", "pod"), FailedPrecondition)
    assert "not a directory with a quota" in message


def test_errors_of_the_api_server_are_not_treated_as_refusals(cluster: Cluster) -> None:
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
def test_an_invalid_request_is_refused_before_any_review(cluster: Cluster, raw: bytes) -> None:
    ca = cluster.client.ca_file.read_bytes()
    with grpc.secure_channel(cluster.client.address, grpc.ssl_channel_credentials(ca)) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{METHOD}")
        with pytest.raises(grpc.RpcError) as excinfo:
            call(raw, timeout=30)
    refused: Any = excinfo.value
    assert refused.code().name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
    assert cluster.api.asked == []


def test_silent_connections_do_not_block_others(cluster: Cluster) -> None:
    """Silent connections without TLS, after the TLS handshake, and calls without a request."""
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


def test_one_address_is_limited_to_its_share_of_slots() -> None:
    slots = RequestSlots(total=8, per_address=3)
    releases = [slots.acquire("ipv4:10.0.0.1:4000") for _ in range(3)]
    assert slots.acquire("ipv4:10.0.0.1:5000") is None
    assert slots.acquire("ipv6:%5B::1%5D:5000") is not None
    for free in releases:
        assert free is not None
        free()
    acquired = [slots.acquire(f"ipv4:10.0.1.{number}:1") for number in range(9)]
    assert [free is not None for free in acquired] == [True] * 7 + [False] * 2


def test_a_node_plugin_trusts_only_the_issuers_certificate(cluster: Cluster) -> None:
    certificate(cluster.folder / "other")
    client = replace(cluster.client, ca_file=cluster.folder / "other" / "ca.crt")
    with pytest.raises(Unreachable):
        client.issue(VolumeId.parse(MINE), tokens(cluster.api.issue("a", "pod")))
    assert cluster.api.asked == []


def test_a_renewed_certificate_is_used_without_a_restart(cluster: Cluster) -> None:
    certificate(cluster.folder / "tls")
    cluster.issue(MINE, cluster.api.issue("a", "pod"))


# The node plugin with an issuer
