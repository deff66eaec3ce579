"""Node image for kind: `python -m images.kind_node` prints the archive's path.

kind's published node image comes from a registry. This one has the same parts and needs none:
Debian packages, the start-up files of kind's own Go module, the programs of the test cluster, and
the images of the control plane, which each node imports when it starts. Pods get their addresses
from containerd (`conf_template`), so that no network add-on has to run; `testcluster.kind` adds
the routes between nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from images.commands import ImageError, run
from images.debian import root_folder, suite
from images.oci import Config, Layer, write_archive
from images.pause import PAUSE_IMAGE, pause_archive
from programs import binaries

__all__ = ["NODE_IMAGE", "main", "node_archive"]

NODE_IMAGE = "localhost/fireflyer/kind-node:test"
FILES = Path(__file__).with_name("kind")

NODE_PACKAGES = (
    "bash", "ca-certificates", "conntrack", "containerd", "containernetworking-plugins", "dbus",
    "e2fsprogs", "ethtool", "gawk", "iproute2", "iptables", "jq", "kmod", "libseccomp2", "mount",
    "procps", "runc", "systemd", "systemd-sysv", "util-linux",
)  # fmt: skip
POD_PACKAGES = ("base-files", "conntrack", "coreutils", "dash", "iptables", "kmod")
"""Packages of the programs that kube-proxy calls."""
IPTABLES = ("tables", "tables-save", "tables-restore")

EXCLUDED = tuple(f"/usr/share/{name}/*" for name in ("doc", "man", "info", "locale", "lintian"))
NODE_PROGRAMS = ("kubeadm", "kubelet", "kubectl")
POD_PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "etcd")
DNS = "coredns"
KIND_FILES = (
    "usr/local/bin/entrypoint", "kind/bin", "etc/crictl.yaml", "etc/default/kubelet",
    "etc/sysctl.d", "etc/systemd/system/kubelet.service", "etc/systemd/system/kubelet.service.d",
    "etc/systemd/system/kubelet.slice", "etc/systemd/system/undo-mount-hacks.service",
)  # fmt: skip
"""Files below images/base/files in kind's module."""
ENABLED = ("containerd", "kubelet", "import-images", "undo-mount-hacks")


def main() -> int:
    """Builds the image, or finds it in the cache."""
    try:
        print(node_archive())
    except (ImageError, binaries.BinaryError) as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


def node_archive() -> Path:
    """The archive of the node image, from the cache or newly built (minutes; needs root)."""
    cache = binaries.cache() / "images"
    programs = binaries.require(*NODE_PROGRAMS, *POD_PROGRAMS, DNS, "kind")
    parts = [suite(), [str(path) for path in programs.values()], Path(__file__).read_text()]
    parts += [path.read_text() for path in sorted(FILES.iterdir())]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    target = cache / f"kind-node-{key}.tar"
    if target.exists():
        os.utime(target)  # in use: see testcluster.prune
    else:
        cache.mkdir(parents=True, exist_ok=True)
        print("images: building the node image of kind", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _build(target, programs, cache, Path(scratch))
    return target


def _build(target: Path, programs: dict[str, Path], cache: Path, scratch: Path) -> None:
    root = scratch / "root"
    root_folder(root, NODE_PACKAGES, "minbase", EXCLUDED)
    _copy_files(root)
    for name in NODE_PROGRAMS:
        shutil.copy2(programs[name], root / "usr/bin" / name)
    images = root / "kind/images"
    images.mkdir(parents=True)
    shutil.copy2(pause_archive(cache), images / "pause.tar")
    pods = _pod_layers(programs, scratch)
    # One image for all of the control plane: each pod's command names its program.
    write_archive(images / "kubernetes.tar", "localhost/kubernetes:test", pods, Config())
    dns = Config(entrypoint=(f"/usr/local/bin/{DNS}",))
    write_archive(images / "coredns.tar", "localhost/coredns:test", pods, dns)
    config = Config(
        entrypoint=("/usr/local/bin/entrypoint", "/sbin/init"), environment={"container": "docker"}
    )
    write_archive(target, NODE_IMAGE, [_layer(root, scratch, "node")], config)


def _copy_files(root: Path) -> None:
    # The program may be in the cache of an earlier build, so the module need not exist.
    command = ["go", "mod", "download", "-json", "sigs.k8s.io/kind"]
    sources = binaries.SOURCES / "kind"
    module = json.loads(run(command, "downloading kind's module failed", folder=sources))["Dir"]
    for name in KIND_FILES:
        source, target = Path(module) / "images/base/files" / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
    for script in (root / KIND_FILES[0], *(root / "kind/bin").iterdir()):
        script.chmod(0o755)
    (root / "kind/version").write_text(binaries.KUBERNETES_VERSION)
    shutil.copy2(FILES / "import-images", root / "kind/bin/import-images")
    shutil.copy2(FILES / "import-images.service", root / "etc/systemd/system")
    (root / "etc/containerd").mkdir(exist_ok=True)
    containerd = (FILES / "containerd.toml").read_text().replace("PAUSE_IMAGE", PAUSE_IMAGE)
    (root / "etc/containerd/config.toml").write_text(containerd)
    shutil.copy2(FILES / "cni.json", root / "etc/containerd/cni.json")
    (root / "etc/kubernetes/manifests").mkdir(parents=True)
    wants_folder = root / "etc/systemd/system/multi-user.target.wants"
    shutil.rmtree(wants_folder, ignore_errors=True)
    wants_folder.mkdir()
    for unit in ENABLED:
        folder = "/lib" if unit == "containerd" else "/etc"
        (wants_folder / f"{unit}.service").symlink_to(f"{folder}/systemd/system/{unit}.service")


def _pod_layers(programs: dict[str, Path], scratch: Path) -> list[Layer]:
    root = scratch / "pods"
    root_folder(root, POD_PACKAGES, "extract", EXCLUDED)
    # As on the nodes, which choose it while no rules exist. `extract` sets no alternatives.
    for name in (f"{family}{verb}" for family in ("ip", "ip6") for verb in IPTABLES):
        (root / "usr/sbin" / name).symlink_to("xtables-legacy-multi")
    added = scratch / "programs"
    (added / "usr/local/bin").mkdir(parents=True)
    for name in (*POD_PROGRAMS, DNS):
        shutil.copy2(programs[name], added / "usr/local/bin" / name)
    return [_layer(root, scratch, "pods"), _layer(added, scratch, "programs")]


def _layer(root: Path, scratch: Path, name: str) -> Layer:
    plain = scratch / f"{name}.tar"
    with tarfile.open(plain, "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(root, ".")
    # Read once, on this machine: a fast level.
    layer = Layer.compress(plain, scratch / f"{name}.tar.gz", level=1)
    plain.unlink()
    return layer


if __name__ == "__main__":
    raise SystemExit(main())
