"""What the wheel brings: a library that needs no other, and types that say what it has."""

import re
import subprocess
import sys
from pathlib import Path

import hfreduce
from hfreduce import _native

FOLDER = Path(hfreduce.__file__).parent
ANYWHERE = {
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
}
"""glibc and the compiler's: neither a GPU's nor a network card's library, no MPI, no Python."""

# The buffer protocol has no method's name before Python 3.12.
UNSEEN = r"hfreduce\._native\.Registered\.__buffer__"


def test_the_engine_needs_no_library_but_the_systems():
    read = subprocess.run(
        ["readelf", "--dynamic", _native.__file__], capture_output=True, text=True, check=True
    )
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", read.stdout))
    assert "libc.so.6" in needed, read.stdout
    assert {name for name in needed if not name.startswith("ld-linux")} <= ANYWHERE


def test_the_stubs_say_what_the_engine_has(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.write_text(f"{UNSEEN}\n")
    compared = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "hfreduce._native", "--concise",
         f"--allowlist={allowed}", "--ignore-unused-allowlist"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert (FOLDER / "py.typed").exists()
