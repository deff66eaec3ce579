"""hfreduce-doctor over folders with the files of a node."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hfreduce.doctor import checks, cli
from hfreduce.doctor.machine import Layout, Machine, numbers

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            {soft}                 {hard}               files
Max locked memory         8388608              8388608              bytes
"""

ROUTES = """\
Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
ib0\t0000640A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""

GOOD = {
    "proc/sys/kernel/osrelease": "6.1.0-18-amd64",
    "proc/self/limits": LIMITS.format(soft=1024, hard=4096),
    "proc/self/status": "Name:\tdoctor\nCpus_allowed_list:\t0-7\nMems_allowed_list:\t0-1\n",
    "proc/self/cgroup": "0::/kubepods/pod7",
    "proc/self/mountinfo": "30 25 0:27 / /dev/shm rw - tmpfs shm rw,size=65536k",
    "proc/net/route": ROUTES,
    "proc/sys/net/ipv4/tcp_congestion_control": "cubic",
    "proc/sys/net/ipv4/tcp_wmem": "4096 16384 4194304",
    "proc/sys/net/ipv4/tcp_rmem": "4096 131072 6291456",
    "proc/sys/kernel/numa_balancing": "0",
    "proc/sys/kernel/yama/ptrace_scope": "1",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "sys/kernel/mm/transparent_hugepage/defrag": "always defer [madvise] never",
    "sys/fs/cgroup/kubepods/pod7/cpu.max": "800000 100000",
    "sys/fs/cgroup/kubepods/pod7/memory.max": "max",
    "sys/devices/system/node/node0/cpulist": "0-3",
    "sys/devices/system/node/node1/cpulist": "4-7",
    "sys/class/net/lo/operstate": "unknown",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/speed": "25000",
    "sys/class/net/eth0/mtu": "9000",
}

SECOND = {"sys/class/net/ib0/operstate": "up", "sys/class/net/ib0/speed": "200000"}


@pytest.fixture
def machine(tmp_path):
    def make(files=None, environment=None, instruction_set="avx512", best="avx512"):
        for path, text in (GOOD | (files or {})).items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        return Machine(tmp_path, environment or {}, instruction_set, best)

    return make


def findings_of(machine, name, *, ranks=8, world=64, peer=None):
    findings = checks.examine(machine, Layout(ranks, world, peer))
    return [finding for finding in findings if finding.name == name]


def test_a_good_machine_has_no_findings(machine, capsys):
    assert cli.main(["-g", "8", "--world-size", "64", "-o", "json"], machine()) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["version"], report["status"]) == (1, "ok")
    assert {finding["status"] for finding in report["findings"]} == {"ok"}


LIMITED = "sys/fs/cgroup/kubepods/pod7/"


@pytest.mark.parametrize(
    ("name", "status", "files", "remedy"),
    [
        ("kernel", "warning", {"proc/sys/kernel/osrelease": "4.18.0"}, "5.3"),
        ("open files", "ok", {"proc/self/limits": LIMITS.format(soft=9, hard=4096)}, ""),
        (
            "open files",
            "problem",
            {"proc/self/limits": LIMITS.format(soft=9, hard=9)},
            "LimitNOFILE",
        ),
        ("open files", "warning", {"proc/self/limits": ""}, ""),
        ("memory", "problem", {LIMITED + "memory.max": str(100 << 20)}, "resources.limits.memory"),
        ("processors", "warning", {LIMITED + "cpu.max": "250000 100000"}, "8 processors"),
        ("processors", "warning", {"proc/self/status": "Cpus_allowed_list:\t0-1"}, "fewer ranks"),
        (
            "numa",
            "warning",
            {"proc/self/status": "Cpus_allowed_list:\t0-7\nMems_allowed_list:\t0"},
            "memoryManagerPolicy",
        ),
        ("numa balancing", "warning", {"proc/sys/kernel/numa_balancing": "1"}, "sysctl"),
        (
            "huge pages",
            "warning",
            {
                "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never",
                "sys/kernel/mm/transparent_hugepage/defrag": "[always] defer madvise never",
            },
            "defrag",
        ),
        (
            "congestion control",
            "warning",
            {"proc/sys/net/ipv4/tcp_congestion_control": "vegas"},
            "cubic",
        ),
        (
            "socket buffers",
            "warning",
            {"proc/sys/net/ipv4/tcp_wmem": "4096 16384 212992"},
            "tcp_wmem",
        ),
        ("interfaces", "problem", {"sys/class/net/eth0/operstate": "down"}, "up"),
        ("route", "warning", {"sys/class/net/eth0/speed": "1000"}, "62 MB/s"),
        ("route", "warning", SECOND | {"sys/class/net/eth0/speed": "1000"}, "ib0"),
    ],
)
def test_a_problem_is_found_with_its_remedy(machine, name, status, files, remedy):
    findings = findings_of(machine(files), name)
    assert [finding.status for finding in findings] == [status]
    assert remedy in findings[0].remedy


def test_the_instruction_set_in_use_is_reported(machine):
    assert "HFREDUCE_ISA" in findings_of(machine(instruction_set="avx2"), "instructions")[0].remedy
    assert (
        findings_of(machine(instruction_set="scalar", best="scalar"), "instructions")[0].status
        == "warning"
    )


def test_gdrcopy_is_reported_on_nodes_with_gpus(machine):
    assert "no GPU" in findings_of(machine(), "gdrcopy")[0].found
    node = machine({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: none"})
    assert "by the processor" in findings_of(node, "gdrcopy")[0].found
    finding = findings_of(replace(node, without_gdrcopy="no /dev/gdrdrv"), "gdrcopy")[0]
    assert (finding.status, "no /dev/gdrdrv" in finding.found) == ("ok", True)


def test_a_small_dev_shm_is_not_reported(machine):
    assert findings_of(machine(), "shared memory")[0].status == "ok"
    assert "65536k" in findings_of(machine(), "shared memory")[0].found


def test_the_route_to_a_peer_follows_the_routing_table(machine):
    both = machine(SECOND, {"HFREDUCE_ADDRESS": "10.100.0.1"})
    assert "through ib0" in findings_of(both, "route", peer="10.100.9.9")[0].found
    assert "through eth0" in findings_of(both, "route", peer="10.99.0.1")[0].found
    assert findings_of(both, "interfaces")[0].status == "ok"
    node = machine({"proc/net/route": ROUTES.splitlines()[0]})
    assert findings_of(node, "route", peer="10.100.9.9")[0].status == "problem"


def test_the_address_that_others_use_is_reported(machine):
    def reached_at(address, towards):
        if address == "ib9":
            raise ValueError("no interface that is up matches `ib9`; available: eth0 10.0.0.5")
        return [address or "eth0 10.0.0.5", f"ib0 towards {towards}"]

    def address(setting=None):
        environment = {"HFREDUCE_ADDRESS": setting} if setting else {}
        node = replace(machine(SECOND, environment), reached_at=reached_at)
        return findings_of(node, "address", peer="10.100.9.9")[0]

    assert "others reach eth0 10.0.0.5, chosen by the routes, else ib0" in address().found
    assert "towards 10.100.9.9" in address().found
    assert "by HFREDUCE_ADDRESS=ib0" in address("ib0").found
    assert (address("ib9").status, "available: eth0" in address("ib9").found) == ("problem", True)


def test_invalid_settings_are_found(machine, tmp_path):
    bad = findings_of(machine(environment={"HFREDUCE_CHUNK_BYTES": "7"}), "settings")[0]
    assert (bad.status, "HFREDUCE_CHUNK_BYTES" in bad.remedy) == ("problem", True)
    near = findings_of(machine(environment={"HFREDUCE_CHUNK_BITES": "4096"}), "settings")[0]
    assert (near.status, "HFREDUCE_CHUNK_BYTES" in near.found) == ("warning", True)
    node = machine(environment={"FLYER_TOPOLOGY": str(tmp_path / "none")})
    assert findings_of(node, "topology")[0].status == "problem"


def test_version_1_control_groups_are_understood(machine):
    files = {
        "proc/self/cgroup": "4:memory:/pod\n1:cpu,cpuacct:/pod\n0::/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": str(1 << 30),
    }
    old = machine(files)
    assert "2.0" in findings_of(old, "processors")[0].found
    assert "1 GiB" in findings_of(old, "memory")[0].found


def test_an_empty_root_gives_no_problem(tmp_path):
    findings = checks.examine(Machine(tmp_path, {}, "scalar", "scalar"), Layout(1, 1))
    assert {finding.status for finding in findings} <= {"ok", "warning"}


def test_the_exit_status_is_that_of_the_worst_finding(machine, capsys):
    assert cli.main(["-g", "9"], machine()) == 1
    assert cli.main(["-g", "9"], machine({"proc/self/limits": LIMITS.format(soft=9, hard=9)})) == 2
    assert "problem  open files" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["-g", "0"], ["-g", "8", "--world-size", "4"], ["-x"]])
def test_an_invalid_command_line_is_refused(machine, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments, machine())
    assert ended.value.code == 64
    assert "hfreduce-doctor" in capsys.readouterr().err


def test_lists_of_the_kernel():
    assert numbers("0-2,7,9-10") == {0, 1, 2, 7, 9, 10}
    assert numbers("") == set()


def test_the_page_lists_every_check():
    page = Path(__file__).resolve().parents[3] / "docs/guides/measure-and-check.md"
    table = page.read_text(encoding="utf-8").split("| check |")[1]
    node = Machine(Path("/"), {}, "avx2", "avx2")
    names = {finding.name for finding in checks.examine(node, Layout(8, 8))}
    assert [name for name in names if name not in table] == []
