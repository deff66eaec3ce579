"""Writes the generated modules; needs grpcio-tools (a development dependency)."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["SOURCES", "generate"]

HERE = Path(__file__).resolve().parent
SOURCES = ("deviceplugin.proto",)


def generate(destination: Path) -> list[Path]:
    """Generates messages, stubs' types and services from all sources into a folder."""
    from grpc_tools import protoc

    # A script of this interpreter's environment, which need not be on the PATH.
    plugin = Path(sys.executable).parent / "protoc-gen-mypy"
    for source in SOURCES:
        status = protoc.main(
            [
                "protoc",
                f"--plugin=protoc-gen-mypy={plugin}",
                f"--proto_path=flyer_node/proto={HERE}",
                f"--python_out={destination}",
                f"--mypy_out=quiet:{destination}",
                f"flyer_node/proto/{source}",
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc refused {source}: see above")
    return sorted((destination / "flyer_node" / "proto").iterdir())


if __name__ == "__main__":
    for path in generate(HERE.parent.parent):
        if path.name.endswith(("_pb2.py", "_pb2.pyi")):
            sys.stdout.write(f"{path.name}\n")
