"""ReadWriteOnce: a volume is refused while another node has it, and free when that node died."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from threefs.csi.errors import FailedPrecondition, Unreachable
from threefs.csi.proto import csi_pb2 as csi
from threefs.csi.tickets.ticket_store import SHORT_TIMEOUT_SECONDS
from threefs.csi.volumes.node_claims import WATCH_SECONDS, NodeClaims
from threefs.csi.volumes.volume_id import VolumeId
from threefs.daemon import CLAIM_SECONDS
from threefs.errors import Unavailable

from .driver import TIMEOUT_SECONDS, Driver, Mode, capability, stage_request

if TYPE_CHECKING:
    from typing import Any

PATH = "/volumes/a"
ONE_NODE = (
    Mode.SINGLE_NODE_WRITER,
    Mode.SINGLE_NODE_SINGLE_WRITER,
    Mode.SINGLE_NODE_MULTI_WRITER,
)


@pytest.fixture
def volume(driver: Driver) -> str:
    volume_id: str = driver.create("a").volume_id
    return volume_id


def stage(volume: str, mode: Any = Mode.SINGLE_NODE_WRITER) -> csi.NodeStageVolumeRequest:
    return stage_request(volume, volume_capability=capability(mode))


def unstage(volume: str) -> csi.NodeUnstageVolumeRequest:
    return csi.NodeUnstageVolumeRequest(volume_id=volume, staging_target_path="/k/stage")


def test_a_claim_expires_before_others_may_take_it() -> None:
    # The rates of different nodes' clocks may differ by a tenth.
    assert CLAIM_SECONDS * 1.1 < WATCH_SECONDS * 0.9


@pytest.mark.parametrize("mode", ONE_NODE)
def test_another_nodes_volume_is_refused_until_its_release(
    driver: Driver, volume: str, mode: Any
) -> None:
    driver.files.claim(PATH, "node-b")
    code, words = driver.refused(stage(volume, mode))
    assert code == "FAILED_PRECONDITION"
    assert "node `node-b` uses it" in words
    assert driver.mount_manager.state() == ([], [])
    driver.files.unclaim(PATH, "node-b")
    driver.call(stage(volume, mode))
    assert driver.files.claim_of(PATH) == ("node-a", 1)
    assert driver.mount_manager.claimed_for == {"/k/stage": "node-a"}
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) is None


def test_a_volume_for_many_nodes_has_no_claim(driver: Driver, volume: str) -> None:
    driver.files.claim(PATH, "node-b")
    driver.call(stage_request(volume))
    assert driver.files.claim_of(PATH) == ("node-b", 1)
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) == ("node-b", 1)


def test_staging_again_on_the_same_node_keeps_the_claim(driver: Driver, volume: str) -> None:
    for _ in range(3):
        driver.call(stage(volume))
    claim = driver.files.claim_of(PATH)
    assert claim is not None
    assert claim[0] == "node-a"


def test_the_claim_of_a_dead_node_is_taken_after_it_expired(driver: Driver, volume: str) -> None:
    driver.files.claim(PATH, "node-b")
    for driver.now in (0.0, WATCH_SECONDS - 1.0):
        code, words = driver.refused(stage(volume))
        assert code == "FAILED_PRECONDITION"
    assert "expires in 1 s" in words
    driver.now = WATCH_SECONDS + 1.0
    driver.call(stage(volume))
    assert driver.files.claim_of(PATH) == ("node-a", 2)


def test_a_claim_is_watched_from_its_observation_not_from_the_request(
    driver: Driver, volume: str
) -> None:
    now = 0.0
    claims = NodeClaims("node-a", lambda: now)
    parsed = VolumeId.parse(volume)
    real = driver.files.claim
    real(PATH, "node-b")

    def slow(*arguments: Any) -> tuple[str, int]:
        nonlocal now
        now += 9.0
        return real(*arguments)

    driver.files.claim = slow  # type: ignore[method-assign]
    with pytest.raises(FailedPrecondition):
        claims.acquire(parsed, driver.files)
    now = WATCH_SECONDS + 1.0
    with pytest.raises(FailedPrecondition):
        claims.acquire(parsed, driver.files)
    now = WATCH_SECONDS + 10.0
    claims.acquire(parsed, driver.files)
    assert driver.files.claim_of(PATH) == ("node-a", 2)


def test_a_claim_is_released_with_the_last_mount_of_the_volume(driver: Driver, volume: str) -> None:
    driver.call(stage(volume))
    driver.call(
        stage_request(volume, "/k/other", volume_capability=capability(Mode.SINGLE_NODE_WRITER))
    )
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) is not None
    driver.call(csi.NodeUnstageVolumeRequest(volume_id=volume, staging_target_path="/k/other"))
    assert driver.files.claim_of(PATH) is None


def test_a_node_that_renews_keeps_its_claim(driver: Driver, volume: str) -> None:
    driver.files.claim(PATH, "node-b")
    for renewals in range(10):
        driver.now = renewals * WATCH_SECONDS * 2
        assert driver.refused(stage(volume))[0] == "FAILED_PRECONDITION"
        driver.files.claim(PATH, "node-b")
    assert driver.files.claim_of(PATH) == ("node-b", 11)


def test_the_volumes_condition_names_the_node_that_took_it(driver: Driver, volume: str) -> None:
    driver.call(stage(volume))
    stats = csi.NodeGetVolumeStatsRequest(volume_id=volume, volume_path="/k/stage")
    assert not driver.call(stats).volume_condition.abnormal
    claim = driver.files.claim_of(PATH)
    driver.files.claim(PATH, "node-b", claim)
    condition = driver.call(stats).volume_condition
    assert condition.abnormal
    assert "node `node-b` has claimed" in condition.message
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) == ("node-b", 2)


def test_unstaging_does_not_wait_for_3fs(driver: Driver, volume: str) -> None:
    driver.call(stage(volume))
    driver.timeouts.clear()
    driver.files.fail = Unavailable("away")
    driver.call(unstage(volume))
    assert driver.mount_manager.state() == ([], [])
    assert driver.timeouts == [SHORT_TIMEOUT_SECONDS], "shorter than what other calls wait"
    assert SHORT_TIMEOUT_SECONDS < TIMEOUT_SECONDS / 2


def test_a_claim_is_kept_while_operations_may_be_pending(driver: Driver, volume: str) -> None:
    driver.call(stage(volume))
    driver.mount_manager.clean = False
    driver.call(unstage(volume))
    # When repeated, the volume is already unmounted, and pending operations are still unknown.
    driver.now = CLAIM_SECONDS - 1.0
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) == ("node-a", 1)
    driver.now = CLAIM_SECONDS + 1.0
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) is None


def test_a_claim_is_kept_if_the_end_of_its_mount_is_unknown(driver: Driver, volume: str) -> None:
    driver.call(stage(volume))
    real = driver.mount_manager.unmount

    def unmounted_without_a_result(target: str) -> Any:
        real(target)
        driver.mount_manager.unmount = real  # type: ignore[method-assign]
        raise Unreachable("the mount manager does not answer")

    driver.mount_manager.unmount = unmounted_without_a_result  # type: ignore[method-assign]
    driver.refused(unstage(volume))
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) == ("node-a", 1)
    # The next pod here does not wait, but the earlier operations may still be pending.
    driver.call(stage(volume))
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) == ("node-a", 2)
    driver.now = CLAIM_SECONDS + 1.0
    driver.call(stage(volume))
    driver.call(unstage(volume))
    assert driver.files.claim_of(PATH) is None
