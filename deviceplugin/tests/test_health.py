"""The state machine, the policy and the health_store: pure, with times as arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flyer_node.errors import DataError
from flyer_node.hardware.driver import EventKind, GpuProbe, GpuStatus
from flyer_node.health.detectors import kernel_xid
from flyer_node.health.policy import Action, load_policy, parse_policy
from flyer_node.health.state_machine import (
    State,
)
from flyer_node.health.store import HealthStore, Subject
from flyer_node.inventory import Bridge, Gpu, Hca, HcaPort, Inventory, LinkLayer
from flyer_node.inventory.hca import PortStatus


def test_the_built_in_policy_has_the_papers_xids_with_provenance() -> None:
    policy = load_policy()
    paper = {13, 31, 43, 45, 74, 63, 64, 94, 95, 44, 48, 61, 62, 69, 79, 119}
    assert paper <= policy.xids.keys()
    assert all(policy.xids[code].source.startswith("paper") for code in paper)
    software = {rule.code for rule in policy.xids.values() if rule.klass == "software"}
    assert software == {13, 31, 43, 45}
    assert all(policy.xids[code].action is Action.RECORD for code in software)
    assert all(rule.reset for rule in policy.xids.values() if rule.action is Action.UNHEALTHY), (
        "every removal says what ends it"
    )
    assert policy.rule(74).action is Action.PAIR
    assert policy.rule(777).action is Action.SUSPECT, "an unknown Xid takes nothing out"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("version = 3", "version"),
        ("version = 'a'\nnonsense = 1", "nonsense"),
        ("version = 'a'\n[timers]\ngpu_hold = -1", "gpu_hold"),
        ("version = 'a'\n[timers]\ngpu_hold = 'x'", "gpu_hold"),
        ("version = 'a'\n[timers]\nhold = 1", "hold"),
        ("version = 'a'\n[[xid]]\ncode = 0", r"xid\[0\]\.code"),
        ("version = 'a'\n[[xid]]\ncode = 79\nclass = 'odd'", r"xid\[0\]\.class"),
        ("version = 'a'\n[[xid]]\ncode = 79\nclass = 'ecc'\naction = 'kill'", "action"),
        (
            "version = 'a'\n[[xid]]\ncode = 79\nclass = 'ecc'\naction = 'record'\nremedy = ''",
            "remedy",
        ),
        ("not toml", "TOML"),
    ],
)
def test_the_error_of_an_invalid_policy_names_the_field(text: str, names: str) -> None:
    with pytest.raises(DataError, match=names):
        parse_policy(text, "policy.toml")


def test_two_rows_of_one_xid_are_refused() -> None:
    row = "[[xid]]\ncode = 9\nclass = 'ecc'\naction = 'record'\nremedy = 'r'\nsource = 's'\n"
    with pytest.raises(DataError, match="one rule per Xid"):
        parse_policy("version = 'a'\n" + row * 2, "p")
    with pytest.raises(DataError, match="missing"):
        load_policy(Path("/nonexistent/missing.toml"))


@pytest.mark.parametrize(
    ("line", "address", "code", "process"),
    [
        (
            "NVRM: Xid (PCI:0000:41:00): 79, pid=1234, GPU has fallen off the bus.",
            "0000:41:00",
            79,
            "1234",
        ),
        (
            "NVRM: Xid (PCI:0000:C1:00): 31, pid='77', name=python3, Ch 00000008",
            "0000:c1:00",
            31,
            "77",
        ),
        ("NVRM: Xid (PCI:0000:01:00): 63, pid='<unknown>', Row Remapper", "0000:01:00", 63, ""),
        ("NVRM: Xid (PCI:0000:01:00): 48", "0000:01:00", 48, ""),
    ],
)
def test_lines_of_the_kernels_log(line: str, address: str, code: int, process: str) -> None:
    xid = kernel_xid(line)
    assert xid is not None
    assert (xid.address, xid.code, xid.process) == (address, code, process)


def test_other_lines_are_not_xids() -> None:
    assert kernel_xid("NVRM: loading NVIDIA UNIX x86_64 Kernel Module") is None
    assert kernel_xid("NVRM: Xid (PCI:zz): nope") is None
    # What mount(2) in a user namespace makes the kernel write.
    quoted = "overlay: Unknown parameter 'NVRM: Xid (PCI:0000:01:00): 79'"
    assert kernel_xid(quoted) is None


NODE = Inventory(
    "n",
    gpus=tuple(Gpu(f"G{i}", i, i, f"0000:0{i}:00.0") for i in range(4)),
    bridges=(Bridge("G0", "G1", 12), Bridge("G2", "G3", 12)),
    hcas=(Hca("mlx5_0", None, ports=(HcaPort(1, LinkLayer.INFINIBAND),)),),
)


def health_store() -> HealthStore:
    book = HealthStore(load_policy())
    book.track(NODE, 0)
    return book


def port(state: str = "active", downed: int = 0) -> PortStatus:
    return PortStatus("mlx5_0", 1, state, "linkup", {"link_downed": downed})


def test_one_xid_from_two_sources_is_one_and_repeats_count() -> None:
    book = health_store()
    assert book.xid(NODE, "G0", 79, 10, source="driver")
    assert not book.xid(NODE, "G0", 79, 11, source="kernel", process="5", line="x")
    assert book.xid(NODE, "G0", 79, 12, source="driver")
    assert book.xid(NODE, "G0", 79, 60, source="kernel")
    assert book.xid(NODE, "G1", 79, 12.5, source="kernel"), "another GPU"


def test_xids_of_three_processes_in_a_day_make_a_gpu_suspect() -> None:
    book = health_store()
    for hour, process in enumerate(("1", "1", "2", "2")):
        book.xid(NODE, "G0", 31, hour * 3600.0, source="kernel", process=process)
    assert book.health[Subject("gpu", "G0")].state is State.HEALTHY
    book.xid(NODE, "G0", 31, 90_500.0, source="kernel", process="3")
    assert book.health[Subject("gpu", "G0")].state is State.HEALTHY, "the first is a day old"
    book.xid(NODE, "G0", 31, 90_600.0, source="kernel", process="4")
    assert book.health[Subject("gpu", "G0")].state is State.SUSPECT
    assert not book.out_of_service("gpu")


def test_a_year_of_the_papers_xids_quarantines_for_hardware_only() -> None:
    """Table VI's counts on one node, an Xid an hour: software Xids take no GPU out."""
    counts = {74: 55, 13: 1, 31: 25, 43: 43, 45: 2, 63: 2, 94: 1, 44: 1, 69: 1}
    book, now = health_store(), 0.0
    for code, count in counts.items():
        for turn in range(count):
            now += 3600
            book.xid(NODE, f"G{turn % 4}", code, now, source="driver")
            assert not book.out_of_service("gpu"), code
    for code in (48, 61, 62, 64, 79, 95, 119):
        now += 90_000
        book.xid(NODE, "G2", code, now, source="driver")
        assert book.out_of_service("gpu") == {"G2"}
        good = GpuStatus("G2", answers=True, recovery_action=0)
        for later in (0, 4000, 8000):
            book.gpu_statuses(NODE, [good], now + later)
            book.gpus_probed(NODE, [GpuProbe("G2")], now + later)
            assert book.out_of_service("gpu") == {"G2"}, f"Xid {code} returned without a reset"
        book.gpu_statuses(NODE, [replace(good, answers=False)], now + 8001)
        for later in (12_000, 16_000, 20_000):
            book.gpu_statuses(NODE, [good], now + later)
            book.gpus_probed(NODE, [GpuProbe("G2")], now + later)
        assert not book.out_of_service("gpu"), f"Xid {code} has no way back"


def test_increasing_volatile_errors_are_faults_and_cleared_ones_prove_a_reset() -> None:
    book, record = health_store(), Subject("gpu", "G0")

    def counted(errors: int, now: float) -> State:
        status = GpuStatus("G0", answers=True, recovery_action=0, uncorrectable_errors=errors)
        book.gpu_statuses(NODE, [status], now)
        return book.health[record].state

    assert counted(3, 0) is State.HEALTHY, "errors of before"
    assert counted(4, 1) is State.SUSPECT
    assert book.health[record].reason == "UncorrectableEcc"
    book.xid(NODE, "G0", 48, 2, source="driver")
    assert counted(4, 4000) is State.UNHEALTHY
    assert counted(0, 4001) is State.RECOVERING


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (EventKind.ECC, State.SUSPECT),
        (EventKind.UNAVAILABLE, State.UNHEALTHY),
        (EventKind.RECOVERY_ACTION, State.HEALTHY),
    ],
)
def test_driver_events_are_faults(kind: EventKind, state: State) -> None:
    book = health_store()
    book.event("G0", kind, 5)
    assert book.health[Subject("gpu", "G0")].state is state


def test_short_link_cuts_count_and_a_counter_reset_does_not() -> None:
    book = health_store()
    book.port_statuses([port(downed=7)], 0)
    assert book.health[Subject("hca", "mlx5_0-1")].state is State.HEALTHY
    assert book.port_statuses([port(downed=8)], 1) == {"mlx5_0-1": 1}
    assert book.health[Subject("hca", "mlx5_0-1")].state is State.SUSPECT
    assert book.port_statuses([port(downed=0)], 2) == {"mlx5_0-1": 0}
    book.port_statuses([port(downed=1)], 3)
    assert not book.out_of_service("hca")
    book.port_statuses([port(downed=2)], 4)
    assert book.out_of_service("hca") == {"mlx5_0-1"}
    assert book.health[Subject("hca", "mlx5_0-1")].reason == "LinkFlapping"


def test_a_port_down_for_less_than_its_grace_period_stays_in_service() -> None:
    book = health_store()
    book.port_statuses([port("down")], 0)
    assert not book.out_of_service("hca")
    book.port_statuses([port("down")], 0.5)
    assert not book.out_of_service("hca")
    book.port_statuses([port("down")], 1.0)
    assert book.out_of_service("hca")


def test_a_reboot_proves_every_reset_and_keeps_the_cause() -> None:
    book = health_store()
    book.xid(NODE, "G0", 79, 0, source="driver")
    record = dict(book.health)
    later = health_store()
    later.restore(record, same_boot=False)
    device = later.health[Subject("gpu", "G0")]
    assert (device.reason, device.reset_seen) == ("Xid79", True)
    again = health_store()
    again.restore(record, same_boot=True)
    assert not again.health[Subject("gpu", "G0")].reset_seen


def recovering(book: HealthStore, uuid: str = "G0") -> float:
    """A GPU that was reset and is on probation; when that is so."""
    book.xid(NODE, uuid, 79, 0, source="driver")
    book.gpu_statuses(NODE, [GpuStatus(uuid, answers=False)], 3000)
    book.gpu_statuses(NODE, [GpuStatus(uuid, answers=True, recovery_action=0)], 4000)
    assert book.health[Subject("gpu", uuid)].state is State.RECOVERING
    return 4000


GOOD = GpuProbe("G0", uncorrectable_errors=2, link_width=16, link_width_max=16)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (
            replace(GOOD, refused="its utilisation (Unknown Error)"),
            "GPU query failed: its utilisation",
        ),
        (replace(GOOD, recovery_action=1), "the driver requests GPU_RESET"),
        (replace(GOOD, remap_pending=True), "a memory row remap"),
        (replace(GOOD, uncorrectable_errors=5), "3 new uncorrectable memory errors"),
        (replace(GOOD, link_width=8), "8 of 16 lanes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gpu_returns_only_after_a_probe_at_each_end_of_its_probation(
    after: GpuProbe, expected: str
) -> None:
    record = Subject("gpu", "G0")
    for last, state in ((GOOD, State.HEALTHY), (after, State.UNHEALTHY)):
        book = health_store()
        now = recovering(book)
        assert book.gpus_to_probe(NODE, now) == ("G0",)
        book.gpus_probed(NODE, [GOOD], now)
        assert not book.gpus_to_probe(NODE, now + 1), "one sample, and then time has to pass"
        end = book.health[record].until
        assert end >= now + 30
        assert book.gpus_to_probe(NODE, end) == ("G0",)
        book.gpus_probed(NODE, [last], end)
        assert book.health[record].state is state
    assert expected in book.health[record].message
    assert [fault.code for fault in book.fault_events][-1] == "ProbeFailed"


def test_a_restarted_agent_restarts_the_probation() -> None:
    book = health_store()
    now = recovering(book)
    book.gpus_probed(NODE, [GOOD], now)
    later = health_store()
    later.restore(book.health, same_boot=True)
    assert later.gpus_to_probe(NODE, now + 29) == ("G0",)
    later.gpus_probed(NODE, [GOOD], now + 29)
    record = later.health[Subject("gpu", "G0")]
    assert (record.state, record.until) == (State.RECOVERING, now + 59)


def test_a_pair_returns_when_both_ends_prove_all_links() -> None:
    record = Subject("pair", "pair-G0")
    for links, state in ((12, State.HEALTHY), (11, State.UNHEALTHY)):
        book = health_store()
        [bridge] = [item.id for item in NODE.bridges if item.first == "G0"]
        record = Subject("pair", bridge)
        book.xid(NODE, "G0", 74, 0, source="driver")
        ends = [GpuStatus(gpu_id, answers=True, links_active=12) for gpu_id in ("G0", "G1")]
        book.gpu_statuses(NODE, ends, 100)
        assert book.gpus_to_probe(NODE, 100) == ("G0", "G1")
        for now in (100, book.health[record].until + 60):
            probes = [GpuProbe("G0", links_active=12), GpuProbe("G1", links_active=links)]
            book.gpus_probed(NODE, probes, now)
        assert book.health[record].state is state


def test_a_port_returns_when_its_counters_are_constant() -> None:
    record = Subject("hca", "mlx5_0-1")
    for increase, state in ((0, State.HEALTHY), (4, State.UNHEALTHY)):
        book = health_store()
        for now in (0, 1):
            book.port_statuses([port("down")], now)
        up = port()
        book.port_statuses([up], 50)
        assert book.health[record].state is State.RECOVERING
        worse = replace(up, counters={**up.counters, "symbol_error": increase})
        book.port_statuses([worse], 60)
        assert book.health[record].state is State.RECOVERING
        book.port_statuses([worse], 71)
        assert book.health[record].state is state
    assert "symbol_error increased by 4" in book.health[record].message
