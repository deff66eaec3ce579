"""Contents of the wheel: a library without further dependencies, and types that match it."""

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
"""glibc and the compiler's runtime: no libraries of GPUs, network cards, MPI or Python."""

# Before Python 3.12 the buffer protocol has no method names.
UNSEEN = r"hfreduce\._native\.Registered\.__buffer__"


def test_the_engine_needs_only_libraries_of_the_system():
    readelf = subprocess.run(
        ["readelf", "--dynamic", _native.__file__], capture_output=True, text=True, check=True
    )
    libraries = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf.stdout))
    assert "libc.so.6" in libraries, readelf.stdout
    assert {name for name in libraries if not name.startswith("ld-linux")} <= ANYWHERE


def test_the_stubs_match_the_engine(tmp_path):
    allowed = tmp_path / "allowed"
    allowed.write_text(f"{UNSEEN}\n")
    compared = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "hfreduce._native", "--concise",
         f"--allowlist={allowed}", "--ignore-unused-allowlist"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert (FOLDER / "py.typed").exists()
