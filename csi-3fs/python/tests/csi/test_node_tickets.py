"""Tickets of a node plugin: mounted volumes, renewal, and expired tickets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from threefs.csi.errors import (
    FailedPrecondition,
    InvalidArgument,
    Missing,
    NoPermission,
)
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.tickets.review import PodName
from threefs.csi.volumes.volume_id import VolumeId

from .api_server import pod_path
from .driver import Driver, Mode, capability, publish_request, stage_request
from .issuer import MINE, THEIRS, Cluster, named, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def node(cluster: Cluster, tmp_path: Path) -> Iterator[Driver]:
    """A node without the key: its tickets are issued by the issuer, for the same tree."""
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


def test_a_volume_is_mounted_with_the_pods_token(cluster: Cluster, node: Driver) -> None:
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


def test_a_ticket_is_renewed_at_half_of_its_lifetime(cluster: Cluster, node: Driver) -> None:
    node.call(published(cluster))
    [folder] = (node.folder / "tickets").iterdir()
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    # The mount manager sets the folder's group to the daemon's; no other user can read it.
    assert modes == {"ticket": 0o640, "cluster.json": 0o640, "pods.json": 0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    for passed, seals in ((3500.0, 1), (200.0, 2), (3500.0, 2), (200.0, 3)):
        passes(cluster, node, passed)
        node.node.renew()
        assert len(cluster.seals) == seals
    assert {seal["directory"] for seal in cluster.seals} == {cluster.seals[0]["directory"]}
    # A second pod renews with its own token, if renewal is due.
    passes(cluster, node, 3700.0)
    cluster.api.add_pod("a", "second", "node-a", ("claim",))
    node.call(published(cluster, "second", "/k/second"))
    assert len(cluster.seals) == 4


def passes(cluster: Cluster, node: Driver, seconds: float) -> None:
    """Advance the time of the issuer and of the node."""
    node.wall += seconds
    cluster.driver.wall += seconds


def refusals(node: Driver) -> float:
    counted = node.metrics.registry.get_sample_value(
        "threefs_csi_tickets_total", {"result": "refused"}
    )
    return counted or 0.0


def test_a_valid_ticket_works_while_the_issuer_is_unavailable(
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
    # It is still genuine, and its pod exists.
    cluster.api.fail = 0
    node.node.renew()
    assert len(cluster.seals) == 2


def test_a_ticket_is_renewed_while_one_of_its_pods_exists(cluster: Cluster, node: Driver) -> None:
    api = cluster.api
    api.add_pod("a", "second", "node-a", ("claim",))
    node.call(published(cluster))
    node.call(published(cluster, "second", "/k/second"))
    del api.objects[pod_path("a", "pod")]
    node.call(csi.NodeUnpublishVolumeRequest(volume_id=MINE, target_path="/k/pod"))
    passes(cluster, node, 3700.0)
    node.node.renew()
    assert len(cluster.seals) == 2
    # The node claims to have it mounted without a pod that mounts it.
    api.objects[pod_path("a", "second")]["status"]["phase"] = "Succeeded"
    passes(cluster, node, 3700.0)
    node.node.renew()
    assert (len(cluster.seals), refusals(node)) == (2, 1)


def test_a_renewal_needs_a_genuine_ticket_of_this_node_and_volume(cluster: Cluster) -> None:
    api, client = cluster.api, cluster.client
    own = VolumeId.parse(MINE)
    pod = api.objects[pod_path("a", "pod")]["metadata"]
    pods = [PodName("a", "pod", pod["uid"])]
    ticket = cluster.issue(MINE, api.issue("a", "pod")).ticket
    client.renew(own, ticket, pods)
    fields = json.loads(ticket)
    other_inode = cluster.driver.files.stat("/volumes/theirs").inode
    seals = len(cluster.seals)
    for text, names, kind in (
        ("ffticket1:00:00", pods, NoPermission),
        (json.dumps(fields | {"node": "node-b"}), pods, NoPermission),
        (json.dumps(fields | {"directory": other_inode}), pods, FailedPrecondition),
        (ticket, [], InvalidArgument),
        (ticket, [PodName("a", "pod", "another uid")], NoPermission),
        (ticket, [PodName("b", "pod", pod["uid"])], NoPermission),
        (ticket, [PodName("a", "../../b/pods/pod", pod["uid"])], NoPermission),
    ):
        with pytest.raises(kind):
            client.renew(own, text, names)
    # A ticket is valid for one volume only, even if pods of another one are on this node.
    other = api.objects[pod_path("b", "pod")]["metadata"]
    with pytest.raises(FailedPrecondition):
        client.renew(VolumeId.parse(THEIRS), ticket, [PodName("b", "pod", other["uid"])])
    cluster.node_token(api.issue("a", "pod"))
    with pytest.raises(NoPermission):
        client.renew(own, ticket, pods)
    assert len(cluster.seals) == seals


def test_a_ticket_is_not_renewed_without_its_claim_and_volume(cluster: Cluster) -> None:
    api, own = cluster.api, VolumeId.parse(MINE)
    pods = [PodName("a", "pod", api.objects[pod_path("a", "pod")]["metadata"]["uid"])]
    ticket = cluster.issue(MINE, api.issue("a", "pod")).ticket
    # Deleted and recreated under the same name by the same tenant: another directory.
    cluster.driver.call(csi.DeleteVolumeRequest(volume_id=MINE))
    with pytest.raises(Missing):
        cluster.client.renew(own, ticket, pods)
    cluster.driver.create("mine")
    with pytest.raises(FailedPrecondition, match="deleted and recreated"):
        cluster.client.renew(own, ticket, pods)
    fresh = cluster.issue(MINE, api.issue("a", "pod")).ticket
    cluster.client.renew(own, fresh, pods)
    seals = len(cluster.seals)
    del api.objects["/api/v1/namespaces/a/persistentvolumeclaims/claim"]
    with pytest.raises(NoPermission, match="no claim"):
        cluster.client.renew(own, fresh, pods)
    assert len(cluster.seals) == seals


def test_a_claim_of_one_node_is_taken_when_its_volume_is_mounted(
    cluster: Cluster, node: Driver
) -> None:
    single_writer = capability(Mode.SINGLE_NODE_WRITER)
    cluster.driver.files.claim("/volumes/mine", "node-b")
    code, words = node.refused(published(cluster, volume_capability=single_writer))
    assert (code, "node-b" in words) == ("FAILED_PRECONDITION", True)
    assert targets(node) == []
    cluster.driver.files.unclaim("/volumes/mine", "node-b")
    node.call(published(cluster, volume_capability=single_writer))
    assert cluster.driver.files.claim_of("/volumes/mine") == ("node-a", 1)
    node.call(csi.NodeUnpublishVolumeRequest(volume_id=MINE, target_path="/k/pod"))
    node.call(csi.NodeUnstageVolumeRequest(volume_id=MINE, staging_target_path="/k/stage"))
    assert cluster.driver.files.claim_of("/volumes/mine") is None


def test_expired_unused_tickets_are_removed(cluster: Cluster, node: Driver) -> None:
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
    log = "".join(capfd.readouterr())
    assert "ticket issued" in log
    assert token not in log
    assert cluster.client.token_file.read_text() not in log
