"""Contents of the wheel: a library without further dependencies, and types that match it."""

import re
import subprocess
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


def test_the_engine_needs_only_libraries_of_the_system():
    readelf = subprocess.run(
        ["readelf", "--dynamic", _native.__file__], capture_output=True, text=True, check=True
    )
    libraries = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf.stdout))
    assert "libc.so.6" in libraries, readelf.stdout
    assert {name for name in libraries if not name.startswith("ld-linux")} <= ANYWHERE


def test_type_hints_are_shipped():
    assert (FOLDER / "py.typed").exists()
