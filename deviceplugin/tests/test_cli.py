"""`flyer-node` as a command: real processes with the fake driver."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest
from flyer_node.errors import SettingError
from flyer_node.settings import settings_from

from deviceplugin.testing.sysfs import set_port

if TYPE_CHECKING:
    from conftest import Node


def flyer_node(node: Node, *arguments: str, **flags: str) -> subprocess.CompletedProcess[str]:
    values = [f"--{k.replace('_', '-')}={v}" for k, v in (node.flags | flags).items()]
    command = [sys.executable, "-m", "flyer_node", arguments[0], *values, *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_inventory_as_text_and_json(machine: Node) -> None:
    result = flyer_node(machine, "inventory", "-o", "json")
    assert result.returncode == 0, result.stderr
    data = json.loads(result.stdout)
    assert (len(data["gpus"]), len(data["bridges"]), len(data["hcas"])) == (8, 4, 1)
    text = flyer_node(machine, "inventory").stdout
    assert "12 links to GPU 1" in text
    assert "HCA mlx5_0" in text


def test_the_pcie_tree_and_nccls_topology_file(machine: Node) -> None:
    text = flyer_node(machine, "topo").stdout
    assert "pci0000:a0 (shared: about 37.5 GB/s to the CPU in total)" in text
    assert "pair GPU 4 = GPU 5" in text
    system = ET.fromstring(flyer_node(machine, "topo", "-o", "xml").stdout)
    assert len(list(system.iter("pci"))) == 9


def test_the_doctor_reports_problems_and_remedies(machine: Node) -> None:
    set_port(machine.sysfs, "mlx5_0", up=False)
    (machine.folder / "dev/nvidia5").unlink()
    result = flyer_node(machine, "doctor")
    assert result.returncode == 1
    for part in ("no kubelet at", "no nvidia5 below", "mlx5_0 port 1 is down", "->"):
        assert part in result.stdout
    levels = {
        finding["level"] for finding in json.loads(flyer_node(machine, "doctor", "-o=json").stdout)
    }
    assert levels >= {"ok", "error"}


def test_a_node_without_a_driver_has_no_gpus(
    machine: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    result = flyer_node(machine, "inventory", "-o", "json")
    data = json.loads(result.stdout)
    assert data["gpus"] == []
    assert len(data["hcas"]) == 1
    assert {finding["kind"] for finding in data["findings"]} == {"Driver"}


def test_the_commands_of_the_guide_run(machine: Node) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "gpus-and-traffic-classes.md"
    commands = re.findall(r"^\$ flyer-node ([^#\n]*)", guide.read_text(), re.MULTILINE)
    assert len(commands) >= 4
    for words in commands:
        result = flyer_node(machine, *words.split())
        # The doctor reports the missing kubelet.
        assert result.returncode == (1 if "doctor" in words else 0), (words, result.stderr)
        assert result.stdout


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("slots", "0", "an integer from 1 to 1000"),
        ("slots", "many", "an integer"),
        ("poll", "0", "a number from 0.1"),
        ("poll", "nan", "a number from 0.1"),
        ("device-mode", "both", "cdi or nodes"),
        ("metrics-port", "70000", "0 to 65535"),
        ("sysfs-root", "sys", "an absolute path"),
        ("log-level", "loud", "debug or info"),
    ],
)
def test_the_error_of_an_invalid_setting_names_flag_and_remedy(
    flag: str, value: str, expected: str
) -> None:
    with pytest.raises(SettingError, match=rf"--{flag}: invalid value '{value}'.*{expected}"):
        settings_from([f"--{flag}={value}"], {})


def test_environment_variables_set_flags(machine: Node) -> None:
    settings = settings_from([], {"FLYER_NODE_SLOTS": "7", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert (settings.slots, settings.api_server) == (7, "https://10.0.0.1:443")
    assert settings_from(["--slots=9"], {"FLYER_NODE_SLOTS": "7"}).slots == 9
    result = flyer_node(machine, "run", slots="0")
    assert result.returncode == 2
    assert "--slots: invalid value '0'" in result.stderr


def test_sigterm_ends_the_agent_with_its_sockets_and_its_worker(machine: Node) -> None:
    values = [f"--{k.replace('_', '-')}={v}" for k, v in machine.flags.items()]
    agent = subprocess.Popen([sys.executable, "-m", "flyer_node", "run", *values])
    folder = machine.folder / "p"
    try:
        deadline = time.monotonic() + 60
        while len(list(folder.glob("flyer-*.sock"))) < 5:
            assert time.monotonic() < deadline
            assert agent.poll() is None
            time.sleep(0.02)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(60) == 0
    finally:
        agent.kill()
    assert not list(folder.iterdir())
    result = subprocess.run(
        ["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=False
    )
    assert not result.stdout


RESIDENT_KIB_MAX = 80_000
"""Memory of agent and worker together; shared pages are counted twice."""


def resident_kib(pid: int) -> int:
    with Path(f"/proc/{pid}/status").open() as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def test_agent_and_worker_are_small_on_eight_gpus(machine: Node) -> None:
    values = [f"--{k.replace('_', '-')}={v}" for k, v in machine.flags.items()]
    agent = subprocess.Popen([sys.executable, "-m", "flyer_node", "run", *values])
    try:
        deadline = time.monotonic() + 60
        while len(list((machine.folder / "p").glob("flyer-*.sock"))) < 5:
            assert time.monotonic() < deadline
            assert agent.poll() is None
            time.sleep(0.02)
        result = subprocess.run(
            ["pgrep", "-P", str(agent.pid)], capture_output=True, text=True, check=True
        )
        [worker] = (int(pid) for pid in result.stdout.split())
        sizes = {"agent": resident_kib(agent.pid), "worker": resident_kib(worker)}
        print(sizes)
        assert sum(sizes.values()) <= RESIDENT_KIB_MAX, sizes
    finally:
        agent.terminate()
        assert agent.wait(60) == 0
