"""Volumes are created, listed, expanded and deleted; invalid requests change nothing."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest
import threefs
from threefs.csi.proto import csi_pb2 as csi

from .driver import GIBIBYTE, Driver, Mode, capability

BLOCK = csi.VolumeCapability(
    block=csi.VolumeCapability.BlockVolume(),
    access_mode=Mode(mode=Mode.SINGLE_NODE_WRITER),
)


def size(required: int = 0, limit: int = 0) -> csi.CapacityRange:
    return csi.CapacityRange(required_bytes=required, limit_bytes=limit)


def create_request(name: str = "pvc-1", **more: Any) -> csi.CreateVolumeRequest:
    fields: dict[str, Any] = {"volume_capabilities": [capability()], **more}
    return csi.CreateVolumeRequest(name=name, **fields)


def test_a_volume_is_a_directory_with_a_hard_quota_and_the_classs_owner(driver: Driver) -> None:
    volume = driver.create(
        "pvc-1",
        capacity_range=size(5 * GIBIBYTE),
        parameters={"path": "/team/a", "uid": "1000", "gid": "2000", "mode": "2770"},
    )
    assert volume.volume_id == "v1:default:/team/a/pvc-1"
    assert volume.capacity_bytes == 5 * GIBIBYTE
    quota = driver.files.quota("/team/a/pvc-1")
    assert quota is not None
    assert quota.bytes_max == 5 * GIBIBYTE
    assert driver.files.mode_and_owner("/team/a/pvc-1/data") == (0o2770, 1000, 2000)


@pytest.mark.parametrize(
    ("parameters", "first", "enlarged"), [({}, 65536, 196608), ({"inodes": "5000"}, 5000, 5000)]
)
def test_every_volume_has_a_limit_of_inodes(
    driver: Driver, parameters: dict[str, str], first: int, enlarged: int
) -> None:
    """All tenants share metadata: without a limit a small claim fills it with empty files."""

    def limit() -> int | None:
        quota = driver.files.quota("/volumes/a")
        return quota.inodes_max if quota else None

    volume = driver.create("a", capacity_range=size(GIBIBYTE), parameters=parameters)
    assert limit() == first
    grow = csi.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id, capacity_range=size(3 * GIBIBYTE)
    )
    driver.call(grow)
    assert limit() == enlarged


def test_a_class_can_keep_removed_files(driver: Driver) -> None:
    driver.create("a", parameters={"trash": "7d"})
    driver.create("b", parameters={"trash": "0"})
    driver.create("c")
    kept = [driver.files.keep_seconds(f"/volumes/{name}") for name in ("a", "b", "c")]
    assert kept == [7 * 86_400, 0, 0]
    # The same request again, and one of a class that keeps nothing.
    driver.create("a", parameters={"trash": "7d"})
    code, message = driver.refused(create_request("a", parameters={}))
    assert code == "ALREADY_EXISTS"
    assert "trash 604800" in message
    code, message = driver.refused(create_request("d", parameters={"trash": "1w"}))
    assert code == "INVALID_ARGUMENT"
    assert "parameter `trash` is `1w`" in message


def test_a_large_claim_is_limited_by_the_inodes_of_its_class(driver: Driver) -> None:
    """A tenant chooses the size: inodes for a pebibyte would exceed the metadata store."""
    volume = driver.create("a", capacity_range=size(GIBIBYTE << 20))
    assert volume.capacity_bytes == GIBIBYTE << 20
    quota = driver.files.quota("/volumes/a")
    assert quota is not None
    assert quota.inodes_max == 1 << 24
    # A volume of an earlier release keeps its limit.
    driver.files.set_quota("/volumes/a", bytes_max=GIBIBYTE << 20, inodes_max=1 << 26)
    grow = csi.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id, capacity_range=size(GIBIBYTE << 21)
    )
    driver.call(grow)
    quota = driver.files.quota("/volumes/a")
    assert quota is not None
    assert quota.inodes_max == 1 << 26


def test_a_repeated_request_returns_the_same_volume(driver: Driver) -> None:
    first = driver.create("pvc-1", capacity_range=size(GIBIBYTE))
    before = driver.files.paths()
    assert driver.create("pvc-1", capacity_range=size(GIBIBYTE)) == first
    assert driver.create("pvc-1", capacity_range=size(0, 2 * GIBIBYTE)) == first
    assert driver.files.paths() == before


@pytest.mark.parametrize("capacity", [size(2 * GIBIBYTE), size(1, GIBIBYTE // 2)])
def test_a_name_that_exists_with_another_size_is_refused(
    driver: Driver, capacity: csi.CapacityRange
) -> None:
    driver.create("pvc-1", capacity_range=size(GIBIBYTE))
    code, words = driver.refused(create_request(capacity_range=capacity))
    assert code == "ALREADY_EXISTS"
    assert "`pvc-1` exists with 1073741824 bytes" in words


@pytest.mark.parametrize("changed", [{"uid": "8"}, {"gid": "8"}, {"mode": "0700"}])
def test_a_name_that_exists_with_another_owner_is_refused(
    driver: Driver, changed: dict[str, str]
) -> None:
    owner = {"uid": "7", "gid": "7", "mode": "0750"}
    first = driver.create("pvc-1", parameters=owner)
    code, words = driver.refused(create_request(parameters={**owner, **changed}))
    assert code == "ALREADY_EXISTS"
    (key,) = changed
    assert f"`pvc-1` exists with {key} {owner[key]} and {changed[key]} was requested" in words
    assert driver.create("pvc-1", parameters=owner) == first


def test_without_a_size_the_default_within_the_limit_applies(driver: Driver) -> None:
    assert driver.create("a").capacity_bytes == GIBIBYTE
    assert driver.create("b", capacity_range=size(0, 1000)).capacity_bytes == 1000


@pytest.mark.parametrize("name", ["ü" * 64, "x" * 128, "a/b", "../../etc", ".", "..", "sha256-x"])
def test_every_name_becomes_a_plain_directory_name(driver: Driver, name: str) -> None:
    volume = driver.create(name)
    assert volume.volume_id.startswith("v1:default:/volumes/")
    leaf = volume.volume_id.rpartition("/")[2]
    assert leaf.startswith(("sha256-", "x"))
    assert f"/volumes/{leaf}/data" in driver.files.paths()
    assert driver.create(name) == volume
    driver.call(csi.DeleteVolumeRequest(volume_id=volume.volume_id))
    assert f"/volumes/{leaf}" not in driver.files.paths()


@pytest.mark.parametrize(
    ("changed", "code", "words"),
    [
        ({"name": ""}, "INVALID_ARGUMENT", "name is missing"),
        ({"name": "x" * 129}, "INVALID_ARGUMENT", "129 bytes and 128 are allowed"),
        ({"volume_capabilities": []}, "INVALID_ARGUMENT", "volume_capabilities are missing"),
        ({"volume_capabilities": [BLOCK]}, "INVALID_ARGUMENT", "volumeMode Filesystem"),
        ({"volume_capabilities": [capability(0)]}, "INVALID_ARGUMENT", "access_mode 0"),
        ({"volume_capabilities": [csi.VolumeCapability()]}, "INVALID_ARGUMENT", "access_type"),
        ({"volume_capabilities": [capability(flags=("suid",))]}, "INVALID_ARGUMENT", "`suid`"),
        ({"capacity_range": size(-1)}, "INVALID_ARGUMENT", "must not be negative"),
        ({"capacity_range": size(5, 4)}, "INVALID_ARGUMENT", "above limit_bytes 4"),
        ({"capacity_range": size((1 << 63) - 1)}, "OUT_OF_RANGE", "the maximum is"),
        ({"parameters": {"colour": "red"}}, "INVALID_ARGUMENT", "unknown parameter `colour`"),
        ({"parameters": {"size": "1Gi"}}, "INVALID_ARGUMENT", "unknown parameter `size`"),
        ({"parameters": {"path": "volumes"}}, "INVALID_ARGUMENT", "`path` is `volumes`"),
        ({"parameters": {"path": "/a/../b"}}, "INVALID_ARGUMENT", "absolute path"),
        ({"parameters": {"path": "/a//b"}}, "INVALID_ARGUMENT", "absolute path"),
        ({"parameters": {"path": "/" + "a" * 60 + "/" + "b" * 60}}, "INVALID_ARGUMENT", "shorter"),
        ({"parameters": {"cluster": "../x"}}, "INVALID_ARGUMENT", "parameter `cluster`"),
        ({"parameters": {"cluster": "other"}}, "INVALID_ARGUMENT", "unknown cluster `other`"),
        ({"parameters": {"mode": "rwx"}}, "INVALID_ARGUMENT", "`mode` is `rwx`"),
        ({"parameters": {"mode": "17777"}}, "INVALID_ARGUMENT", "at most"),
        ({"parameters": {"uid": "-1"}}, "INVALID_ARGUMENT", "`uid` is `-1`"),
        ({"parameters": {"uid": "٣"}}, "INVALID_ARGUMENT", "`uid`"),
        ({"parameters": {"gid": "4294967295"}}, "INVALID_ARGUMENT", "at most"),
        ({"mutable_parameters": {"a": "b"}}, "INVALID_ARGUMENT", "mutable_parameters: `a` cannot"),
        ({"mutable_parameters": {"mode": "0700"}}, "INVALID_ARGUMENT", "`mode` cannot be changed"),
        ({"mutable_parameters": {"inodes": "-1"}}, "INVALID_ARGUMENT", "`inodes` is `-1`"),
        (
            {"volume_content_source": csi.VolumeContentSource()},
            "INVALID_ARGUMENT",
            "volume_content_source",
        ),
    ],
)
def test_the_error_of_an_invalid_creation_names_its_field_and_nothing_is_created(
    driver: Driver, changed: dict[str, Any], code: str, words: str
) -> None:
    status, message = driver.refused(create_request(**changed))
    assert status == code
    assert words in message
    assert driver.files.paths() == ["/"]
    assert driver.counted("CreateVolume", code) == 1


def test_a_directory_that_is_not_a_volume_is_neither_used_nor_removed(driver: Driver) -> None:
    for path in ("/volumes", "/volumes/home"):
        driver.files.make_directory(path)
    driver.files.write("/volumes/home/thesis.tex", 10)
    driver.files.write("/volumes/file", 10)
    code, words = driver.refused(create_request("home"))
    assert code == "ALREADY_EXISTS"
    assert "has files and is not a volume" in words
    assert driver.refused(create_request("file"))[0] == "ALREADY_EXISTS"
    for victim in ("home", "file"):
        driver.call(csi.DeleteVolumeRequest(volume_id=f"v1:default:/volumes/{victim}"))
    driver.call(csi.DeleteVolumeRequest(volume_id="v1:default:/volumes"))
    assert "/volumes/home/thesis.tex" in driver.files.paths()


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("broken_at", range(1, 14))
def test_an_interrupted_creation_is_completed_or_removed(
    driver: Driver, broken_at: int, removed: bool
) -> None:
    inner, calls = driver.files._begin_call, [0]

    def enter(call: str) -> Any:
        calls[0] += 1
        if calls[0] == broken_at:
            raise threefs.Unavailable("the line was cut")
        return inner(call)

    driver.files._begin_call = enter  # type: ignore[method-assign]
    request = create_request(capacity_range=size(GIBIBYTE))
    assert driver.code(request) in ("OK", "UNAVAILABLE")
    driver.files._begin_call = inner  # type: ignore[method-assign]
    if removed:
        driver.call(csi.DeleteVolumeRequest(volume_id="v1:default:/volumes/pvc-1"))
        assert not [path for path in driver.files.paths() if "pvc-1" in path]
    volume = driver.call(request).volume
    quota = driver.files.quota("/volumes/pvc-1")
    assert quota is not None
    assert quota.bytes_max == volume.capacity_bytes
    assert [e.volume.volume_id for e in driver.call(csi.ListVolumesRequest()).entries] == [
        volume.volume_id
    ]


@pytest.mark.parametrize(
    "volume_id",
    [
        "v1:default:/volumes/../etc",
        "v1:default:/volumes/..",
        "v1:default:../volumes/a",
        "v1:default:/volumes//a",
        "v1:default:/volumes/a/",
        "v1:default:/",
        "v1:default:",
        "v1::/volumes/a",
        "v1:../..:/volumes/a",
        "v1:default:/volumes/a\n",
        "v1:default:/volumes/a\0b",
        "v1:default:/volumes/.csi",
        "v1:" + "x" * 200,
    ],
)
def test_a_forged_id_reaches_no_directory(driver: Driver, volume_id: str) -> None:
    driver.create("a")
    before = driver.files.paths()
    for request in (
        csi.DeleteVolumeRequest(volume_id=volume_id),
        csi.ControllerGetVolumeRequest(volume_id=volume_id),
        csi.ControllerExpandVolumeRequest(volume_id=volume_id, capacity_range=size(1 << 40)),
        csi.ValidateVolumeCapabilitiesRequest(
            volume_id=volume_id, volume_capabilities=[capability()]
        ),
    ):
        code, words = driver.refused(request)
        assert code == "INVALID_ARGUMENT"
        assert "volume_id" in words
    assert driver.files.paths() == before


def test_removing_twice_or_a_missing_volume_succeeds(driver: Driver) -> None:
    volume = driver.create("a")
    driver.files.write("/volumes/a/data/file", 5)
    for volume_id in (volume.volume_id, volume.volume_id, "no-id-of-ours", "v1:default:/v/never"):
        driver.call(csi.DeleteVolumeRequest(volume_id=volume_id))
    assert "/volumes/a" not in driver.files.paths()
    assert driver.refused(csi.DeleteVolumeRequest())[0] == "INVALID_ARGUMENT"


def test_pages_together_are_the_complete_list(driver: Driver) -> None:
    assert not driver.call(csi.ListVolumesRequest()).entries
    created = {
        driver.create(f"v-{number}", parameters={"path": f"/p{number % 3}"}).volume_id
        for number in range(10)
    }
    volume_ids, token = [], ""
    while True:
        page = driver.call(csi.ListVolumesRequest(max_entries=3, starting_token=token))
        assert len(page.entries) <= 3
        volume_ids += [entry.volume.volume_id for entry in page.entries]
        token = page.next_token
        if not token:
            break
        # A removal between two pages does not shift the others.
        driver.call(csi.DeleteVolumeRequest(volume_id=volume_ids[0]))
    assert len(volume_ids) == len(set(volume_ids)) == 10
    assert set(volume_ids) == created


@pytest.mark.parametrize("token", ["x", "!!!!", "AAAA", "djE6", "1" * 1000])
def test_a_foreign_page_token_is_refused(driver: Driver, token: str) -> None:
    assert driver.refused(csi.ListVolumesRequest(starting_token=token))[0] == "ABORTED"
    assert driver.refused(csi.ListVolumesRequest(max_entries=-1))[0] == "INVALID_ARGUMENT"


def test_capabilities_are_confirmed_or_explained(driver: Driver) -> None:
    volume = driver.create("a")

    def ask(**changed: Any) -> csi.ValidateVolumeCapabilitiesRequest:
        fields = {"volume_id": volume.volume_id, "volume_capabilities": [capability()], **changed}
        return csi.ValidateVolumeCapabilitiesRequest(**fields)

    not_kept = (Mode.MULTI_NODE_SINGLE_WRITER, Mode.SINGLE_NODE_READER_ONLY)
    for mode in range(1, 8):
        reply = driver.call(ask(volume_capabilities=[capability(mode)]))
        assert reply.HasField("confirmed") is (mode not in not_kept)
        assert ("is not supported: a second node could" in reply.message) is (mode in not_kept)
        code = "INVALID_ARGUMENT" if mode in not_kept else "OK"
        assert driver.code(create_request("b", volume_capabilities=[capability(mode)])) == code
    driver.call(csi.DeleteVolumeRequest(volume_id="v1:default:/volumes/b"))
    refused = driver.call(ask(volume_capabilities=[BLOCK]))
    assert not refused.HasField("confirmed")
    assert "block" in refused.message
    assert "colour" in driver.call(ask(parameters={"colour": "red"})).message
    assert driver.refused(ask(volume_id=""))[0] == "INVALID_ARGUMENT"
    assert driver.refused(ask(volume_capabilities=[]))[0] == "INVALID_ARGUMENT"
    assert driver.refused(ask(volume_id="v1:default:/volumes/b"))[0] == "NOT_FOUND"
    assert driver.refused(ask(volume_id="other"))[0] == "NOT_FOUND"


def test_a_volume_grows_and_never_shrinks(driver: Driver) -> None:
    volume = driver.create("a", capacity_range=size(GIBIBYTE))

    def grow(**changed: Any) -> csi.ControllerExpandVolumeRequest:
        fields = {"volume_id": volume.volume_id, **changed}
        return csi.ControllerExpandVolumeRequest(**fields)

    for _ in range(2):
        reply = driver.call(grow(capacity_range=size(3 * GIBIBYTE)))
        assert reply.capacity_bytes == 3 * GIBIBYTE
        assert not reply.node_expansion_required
    quota = driver.files.quota("/volumes/a")
    assert quota is not None
    assert quota.bytes_max == 3 * GIBIBYTE
    assert driver.call(grow(capacity_range=size(1))).capacity_bytes == 3 * GIBIBYTE
    assert driver.refused(grow(capacity_range=size(1, 2)))[0] == "OUT_OF_RANGE"
    assert driver.refused(grow())[0] == "INVALID_ARGUMENT"
    assert driver.refused(grow(volume_id="", capacity_range=size(1)))[0] == "INVALID_ARGUMENT"
    missing = grow(volume_id="v1:default:/volumes/b", capacity_range=size(1))
    assert driver.refused(missing)[0] == "NOT_FOUND"


def test_the_condition_reports_a_full_volume(driver: Driver) -> None:
    volume = driver.create("a", capacity_range=size(1000))
    ask = csi.ControllerGetVolumeRequest(volume_id=volume.volume_id)
    assert not driver.call(ask).status.volume_condition.abnormal
    driver.files.write("/volumes/a/data/big", 1000)
    condition = driver.call(ask).status.volume_condition
    assert condition.abnormal
    assert "1000 of 1000 bytes" in condition.message
    missing = csi.ControllerGetVolumeRequest(volume_id="v1:default:/volumes/b")
    assert driver.refused(missing)[0] == "NOT_FOUND"
    assert driver.refused(csi.ControllerGetVolumeRequest())[0] == "INVALID_ARGUMENT"


def test_a_list_reports_the_same_condition_as_a_single_volume(driver: Driver) -> None:
    for name in ("full", "well"):
        driver.create(name, capacity_range=size(1000))
    driver.files.write("/volumes/full/data/big", 1000)

    def conditions() -> dict[str, str]:
        entries = driver.call(csi.ListVolumesRequest()).entries
        for entry in entries:
            ask = csi.ControllerGetVolumeRequest(volume_id=entry.volume.volume_id)
            alone = driver.call(ask).status.volume_condition
            assert entry.status.volume_condition == alone
        return {e.volume.volume_id[-4:]: e.status.volume_condition.message for e in entries}

    assert conditions() == {
        "full": "full: 1000 of 1000 bytes used; remove files or expand the claim",
        "well": "serving",
    }
    driver.files.chains_down = 2
    assert all("2 chains of cluster default" in words for words in conditions().values())


def test_an_unreadable_record_hides_only_its_volume(
    driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        driver.create(name)
    driver.files.setxattr("/volumes/b", "user.threefs.volume", b"{}")
    listed = driver.call(csi.ListVolumesRequest()).entries
    assert [entry.volume.volume_id[-1] for entry in listed] == ["a", "c"]
    assert driver.metrics.registry.get_sample_value("threefs_csi_unreadable_records_total") == 1
    log = "".join(capfd.readouterr())
    assert "v1:default:/volumes/b" in log
    assert "cannot be read" in log


def test_capacity_is_the_clusters(driver: Driver) -> None:
    reply = driver.call(csi.GetCapacityRequest())
    assert 0 < reply.available_capacity <= reply.maximum_volume_size.value
    block = csi.GetCapacityRequest(volume_capabilities=[BLOCK])
    assert driver.call(block).available_capacity == 0
    unknown = csi.GetCapacityRequest(parameters={"cluster": "none"})
    assert driver.refused(unknown)[0] == "INVALID_ARGUMENT"


def test_a_second_call_for_a_busy_volume_is_aborted(driver: Driver) -> None:
    driver.files.unblocked.clear()
    first = threading.Thread(target=driver.create, args=("a",))
    first.start()
    while not driver.files.calls:
        first.join(0.01)
    code, words = driver.refused(create_request("a"))
    assert code == "ABORTED"
    assert "CreateVolume of volume `v1:default:/volumes/a` has been in progress" in words
    driver.files.unblocked.set()
    first.join(30)
    assert driver.create("a").volume_id == "v1:default:/volumes/a"


def test_concurrent_creations_create_one_volume(driver: Driver) -> None:
    volume_ids: list[str] = []
    threads = [
        threading.Thread(target=lambda: volume_ids.append(driver.create("same").volume_id))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert volume_ids == ["v1:default:/volumes/same"] * 16


def test_an_unavailable_cluster_is_a_retryable_error(driver: Driver) -> None:
    driver.files.fail = threefs.Unavailable("mgmtd does not answer", who="mgmtd")
    assert driver.refused(create_request())[0] == "UNAVAILABLE"
    driver.files.fail = threefs.NoSpace("the disks are full")
    assert driver.refused(create_request())[0] == "RESOURCE_EXHAUSTED"
    driver.files.fail = None
    driver.create("pvc-1")


@pytest.mark.parametrize(
    "request_",
    [
        csi.ControllerUnpublishVolumeRequest(volume_id="a", node_id="b"),
        csi.ControllerPublishVolumeRequest(volume_id="a", node_id="b"),
    ],
)
def test_calls_that_are_not_advertised_are_unimplemented(driver: Driver, request_: Any) -> None:
    assert driver.refused(request_)[0] == "UNIMPLEMENTED"


def test_an_oversized_request_is_refused_before_it_is_parsed(driver: Driver) -> None:
    code, words = driver.refused(create_request(parameters={"path": "/" + "a" * (2 << 20)}))
    assert code == "RESOURCE_EXHAUSTED"
    assert "the maximum is 1048576" in words
    assert driver.counted("CreateVolume", code) == 1
    # Above the limit of gRPC itself.
    assert driver.code(create_request(parameters={"path": "a" * (5 << 20)})) == "RESOURCE_EXHAUSTED"
    driver.create("still-there")


@pytest.mark.parametrize("call", ["Controller/CreateVolume", "Node/NodeStageVolume"])
def test_an_invalid_message_is_refused_and_counted(driver: Driver, call: str) -> None:
    ask = driver.channel.unary_unary(f"/csi.v1.{call}")
    with pytest.raises(grpc.RpcError) as excinfo:
        ask(b"\xff" * 100, timeout=60)
    error: Any = excinfo.value
    name = call.partition("/")[2]
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == f"{name}: 100 bytes are not a {name}Request of CSI 1.12"
    assert driver.counted(name, "INVALID_ARGUMENT") == 1
    driver.create("still-there")


def test_secrets_are_not_logged(driver: Driver, capfd: pytest.CaptureFixture[str]) -> None:
    driver.create("a", secrets={"key": "hunter2"})
    driver.refused(create_request("b", secrets={"k": "hunter2"}, parameters={"colour": "r"}))
    out, err = capfd.readouterr()
    assert "hunter2" not in out + err
