"""Generator of the stubs of `csi.proto`: ``python -m threefs.csi.proto.generate [FOLDER]``.

Needs grpcio-tools and mypy-protobuf, which are development dependencies.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

__all__ = ["GENERATED", "generate"]

GENERATED = ("csi_pb2.py", "csi_pb2.pyi", "csi_pb2_grpc.py", "csi_pb2_grpc.pyi")
PACKAGE_ROOT = Path(__file__).parents[3]
PROTO = "threefs/csi/proto/csi.proto"
GENERATE_TIMEOUT_SECONDS = 120


def generate(root: Path = PACKAGE_ROOT) -> Path:
    """Write the stubs below `root`, in the package's folders; return the folder."""
    tools = files("grpc_tools") / "_proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PACKAGE_ROOT}", f"-I{tools}"]
    # The plugins are scripts of this interpreter's environment, which need not be on the PATH.
    scripts = Path(sys.executable).parent
    command += [f"--plugin={name}={scripts / name}" for name in PLUGINS]
    outputs = ("python", "grpc_python", "mypy", "mypy_grpc")
    command += [f"--{name}_out={root}" for name in outputs]
    # A servicer may omit methods, which then return UNIMPLEMENTED.
    command.append("--mypy_grpc_opt=generate_concrete_servicer_stubs")
    subprocess.run([*command, PROTO], check=True, timeout=GENERATE_TIMEOUT_SECONDS)
    return root / Path(PROTO).parent


PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")

if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE_ROOT)
