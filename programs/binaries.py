"""Programs built from the Go modules under `go/`, once for each version of a module file.

They are stored in the user's cache folder under a hash of the module's files, so that new clones
and other worktrees find them; a rebuild with a warm Go cache only links.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["KUBERNETES_VERSION", "MODULES", "BinaryError", "find", "require"]

KUBERNETES_VERSION = "v1.36.3"
CSI_PROJECT = "github.com/kubernetes-csi"
SOURCES = Path(__file__).parent / "go"


def _version_flags(version: str) -> str:
    """The linker flags that set Kubernetes' version; without them it reports v0.0.0."""
    major, minor, _ = version.removeprefix("v").split(".")
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    return " ".join(
        f"-X {package}.{name}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in values.items()
    )


class BinaryError(Exception):
    """A program could not be built, or was not built yet."""


@dataclass(frozen=True)
class Module:
    """A folder under `go/` with its own go.mod, and the programs that it builds."""

    folder: str
    programs: dict[str, str]  # name → import path of its main package
    link_flags: str = field(default="")
    static: bool = field(default=False)  # without cgo: runs in any image


MODULES = (
    Module(
        "kubernetes",
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                "kubeadm",
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kube-proxy",
                "kubelet",
                "kubectl",
            )
        },
        link_flags=_version_flags(KUBERNETES_VERSION),
    ),
    Module("coredns", {"coredns": "."}),
    Module("etcd", {"etcd": "."}, static=True),
    Module("kind", {"kind": "sigs.k8s.io/kind"}),
    Module("kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}),
    Module("csi-sanity", {"csi-sanity": f"{CSI_PROJECT}/csi-test/v5/cmd/csi-sanity"}, static=True),
    Module(
        "csi",
        {
            "csi-provisioner": f"{CSI_PROJECT}/external-provisioner/v6/cmd/csi-provisioner",
            "csi-resizer": f"{CSI_PROJECT}/external-resizer/v2/cmd/csi-resizer",
            "csi-node-driver-registrar": "./csi-node-driver-registrar",
            "livenessprobe": "./livenessprobe",
        },
        static=True,
    ),
)


def cache() -> Path:
    """Where built programs are kept: shared by all clones and clusters of this user."""
    if folder := os.environ.get("FLYER_E2E_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fire-flyer"


def require(*names: str) -> dict[str, Path]:
    """The paths of these programs by name; builds what is missing (minutes the first time)."""
    paths = {name: _path(name) for name in names}
    for module in MODULES:
        missing = [name for name in names if name in module.programs and not paths[name].exists()]
        if missing:
            _build(module, missing)
    for folder in {path.parent for path in paths.values()}:
        os.utime(folder)  # in use: see testcluster.prune
    return paths


def folders() -> set[Path]:
    """Where this version's programs are, whether built or not."""
    return {_folder(module) for module in MODULES}


def find(name: str) -> Path:
    """The path of one program that was built before; fails with the command that builds it."""
    path = _path(name)
    if not path.exists():
        raise BinaryError(f"{name} is not built; run `python -m testcluster build {name}` first")
    os.utime(path.parent)
    return path


def _path(name: str) -> Path:
    for module in MODULES:
        if name in module.programs:
            return _folder(module) / name
    raise BinaryError(f"no module under {SOURCES} builds a program called {name}")


def _folder(module: Module) -> Path:
    digest = hashlib.sha256(f"{module.link_flags} {module.static}".encode())
    for path in sorted((SOURCES / module.folder).rglob("*")):
        if path.suffix in {".go", ".mod", ".sum"}:
            digest.update(path.read_bytes())
    return cache() / "bin" / f"{module.folder}-{digest.hexdigest()[:12]}"


def _build(module: Module, names: list[str]) -> None:
    if shutil.which("go") is None:
        raise BinaryError(f"building {', '.join(names)} needs Go 1.26; see https://go.dev/dl")
    folder = _folder(module)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # concurrent builds of the same module are serialized
        for number, name in enumerate(names, 1):
            if (folder / name).exists():
                continue
            count = f"{number} of {len(names)}"
            print(f"programs: building {name} ({module.folder}, {count})", flush=True)
            scratch = folder / f".{name}.new"
            command = ["go", "build", "-buildvcs=false", "-ldflags", f"-s -w {module.link_flags}"]
            build = subprocess.run(
                [*command, "-o", str(scratch), module.programs[name]],
                cwd=SOURCES / module.folder,
                env=os.environ | ({"CGO_ENABLED": "0"} if module.static else {}),
                capture_output=True,
                text=True,
                check=False,
            )
            if build.returncode != 0:
                raise BinaryError(f"building {name} failed:\n{build.stderr.strip()}")
            scratch.rename(folder / name)
