"""OCI image archives, written without a container engine.

An archive is a tar file that `ctr images import` (and `docker load`, `podman load`) reads: blobs
named by their digest, and an index that names the image. Layers are gzip-compressed tar files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Config", "Layer", "write_archive"]

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Config:
    """Command and user of a container of the image."""

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    folder: str = "/"
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """A compressed layer on disk: its digest, and the digest of what is inside."""

    path: Path
    digest: str
    diff_id: str

    @classmethod
    def compress(cls, tar: Path, target: Path, level: int = 6) -> Layer:
        """Compresses an uncompressed tar file; the same bytes give the same layer."""
        inner = hashlib.sha256()
        with (
            tar.open("rb") as source,
            target.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=level, mtime=0) as out,
        ):
            while chunk := source.read(CHUNK_BYTES):
                inner.update(chunk)
                out.write(chunk)
        return cls(target, _digest(target), f"sha256:{inner.hexdigest()}")

    @classmethod
    def load(cls, path: Path) -> Layer:
        """A layer that was compressed before."""
        inner = hashlib.sha256()
        with gzip.open(path) as source:
            while chunk := source.read(CHUNK_BYTES):
                inner.update(chunk)
        return cls(path, _digest(path), f"sha256:{inner.hexdigest()}")


def write_archive(target: Path, name: str, layers: list[Layer], config: Config) -> None:
    """Writes the image `name` (with its tag) as an archive; replaces `target` in one step."""
    config_blob = json.dumps(_config(layers, config), sort_keys=True).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": _descriptor(CONFIG_TYPE, config_blob),
        "layers": [
            {
                "mediaType": LAYER_TYPE,
                "digest": layer.digest,
                "size": layer.path.stat().st_size,
            }
            for layer in layers
        ],
    }
    manifest_blob = json.dumps(manifest, sort_keys=True).encode()
    entry = _descriptor(MANIFEST_TYPE, manifest_blob)
    entry["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [entry]}

    # Other processes may write the same archive concurrently.
    scratch = target.with_name(f".{target.name}.{os.getpid()}.new")
    with tarfile.open(scratch, "w", format=tarfile.GNU_FORMAT) as archive:
        _add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(archive, "index.json", json.dumps(index).encode())
        for blob in (config_blob, manifest_blob):
            _add(archive, _blob_path(_sha256(blob)), blob)
        for layer in {layer.digest: layer for layer in layers}.values():
            archive.add(layer.path, _blob_path(layer.digest))
    scratch.rename(target)


def _config(layers: list[Layer], config: Config) -> dict[str, Any]:
    return {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": list(config.entrypoint),
            "Cmd": list(config.command),
            "Env": [f"{name}={value}" for name, value in config.environment.items()],
            "User": config.user,
            "WorkingDir": config.folder,
            "Labels": config.labels,
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        # Builders refuse a base image that has more layers than entries.
        "history": [{"created_by": "images/oci.py"} for _ in layers],
    }


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _sha256(blob), "size": len(blob)}


def _sha256(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))
