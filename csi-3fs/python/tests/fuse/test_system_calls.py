"""System calls that the filter blocks, and those that still work."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import threefs
from threefs.system_calls import ARCHITECTURES, CLONE, CLONE3, LAST_KNOWN, REFUSED, SOCKET, program

MACHINE = platform.machine()
HEADERS = (
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm-generic/unistd.h"),
)
BEHIND = """
import ctypes, os, sys
sys.path.insert(0, {package!r})
from threefs.system_calls import refuse_system_calls
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert refuse_system_calls()
{code}
"""


def behind(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has installed the filter."""
    package = str(Path(threefs.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", BEHIND.format(package=package, code=code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


pytestmark = pytest.mark.skipif(MACHINE not in ARCHITECTURES, reason="no filter for it")


def test_every_refused_call_fails_with_eperm() -> None:
    """With arguments for which the kernel would return another error, also as root."""
    column = ARCHITECTURES[MACHINE][0]
    numbers = {name: n[column] for name, n in REFUSED.items() if n[column] is not None}
    code = f"""
for name, number in {numbers!r}.items():
    ctypes.set_errno(0)
    answer = libc.syscall(number, -1, -1, -1, -1, -1, -1)
    print(name, answer, ctypes.get_errno())
"""
    result = behind(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{name} -1 1" for name in numbers]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("os.fork()", "PermissionError"),
        ("os.posix_spawn('/bin/true', ['true'], {})", "PermissionError"),
        ("os.execv('/bin/true', ['true'])", "PermissionError"),
        ("__import__('socket').socket(38, 5)", "Errno 97"),  # AF_ALG
        ("__import__('socket').socket(17, 3)", "Errno 97"),  # AF_PACKET
        ("__import__('socket').socket(16, 3, 12)", "Errno 97"),  # NETLINK_NETFILTER
        ("__import__('socket').socket(40, 1)", "Errno 97"),  # AF_VSOCK
    ],
)
def test_a_process_can_neither_start_programs_nor_open_other_sockets(code: str, error: str) -> None:
    result = behind(code)
    assert result.returncode != 0
    assert error in result.stderr


@pytest.mark.parametrize("number", [LAST_KNOWN + 1, 999, CLONE3[0], 0x40000000])
def test_unknown_calls_fail_with_enosys(number: int) -> None:
    result = behind(f"print(libc.syscall({number}, 0, 0, 0, 0), ctypes.get_errno())")
    assert result.stdout == "-1 38\n", result.stderr


def test_threads_files_and_connections_work() -> None:
    code = """
import socket, threading, tempfile, mmap
listener = socket.create_server(("127.0.0.1", 0))
def serve():
    connection, _ = listener.accept()
    connection.sendall(connection.recv(5))
thread = threading.Thread(target=serve)
thread.start()
with socket.create_connection(("localhost", listener.getsockname()[1])) as client:
    client.sendall(b"hello")
    assert client.recv(5) == b"hello"
thread.join()
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
with tempfile.TemporaryFile() as file:
    file.truncate(4096)
    mmap.mmap(file.fileno(), 4096).close()
print("works")
"""
    result = behind(code)
    assert result.stdout == "works\n", result.stderr


def test_calls_of_another_architecture_end_the_process() -> None:
    """The 32-bit calls of x86 have other numbers: through int 0x80, number 11 starts a program."""
    if MACHINE != "x86_64":
        pytest.skip("machine code of x86")
    code = """
import mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
ctypes.CFUNCTYPE(ctypes.c_long)(address)()
print("still here")
"""
    result = behind(code)
    assert result.stdout == ""
    assert result.returncode == -31, "SIGSYS"


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_match_the_kernels_headers(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    if not HEADERS[column].exists():
        pytest.skip(f"{HEADERS[column]} is not installed")
    definitions = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text())
    numbers = {name: int(number) for name, number in definitions}
    # Their names in the generic list, where only the size of an argument differs.
    listed = {name: both[column] for name, both in REFUSED.items()}
    listed |= {"clone": CLONE[column], "clone3": CLONE3[column], "socket": SOCKET[column]}
    assert listed == {name: numbers.get(name) for name in listed}
    assert len(program(machine)) % 8 == 0
