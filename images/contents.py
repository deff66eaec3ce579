"""Contents of each image, as data: the source of the archives that `images.build` makes.

The Containerfiles in this folder build the same images for users; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BASE_PACKAGES", "IMAGES", "NON_ROOT", "TAG", "Image"]

TAG = "test"
NON_ROOT = 65532  # the user ID that distroless images use

# Debian packages of every image; the kernel's ABI is the host's, so nothing else is needed.
BASE_PACKAGES = (
    "base-files",
    "coreutils",
    "dash",
    "grep",
    "libgomp1",  # torch, when a test mounts it
    "libstdc++6",
    "mount",
    "procps",
    "python3",
    "sed",
    "util-linux",
)


@dataclass(frozen=True)
class Image:
    """One image: the workspace packages inside (with their extras) and who runs it."""

    name: str  # without registry and tag
    purpose: str
    packages: tuple[str, ...] = ()  # as in a requirement: "flyer[kube]"
    dependencies: bool = True  # with what those packages depend on
    programs: tuple[str, ...] = ()  # programs of the Go modules of the test cluster
    user: int = NON_ROOT
    entrypoint: tuple[str, ...] = ()
    not_started: tuple[str, ...] = ()  # entry points whose dependencies are not in this image

    @property
    def reference(self) -> str:
        """Its full name in containerd."""
        return f"docker.io/fireflyer/{self.name}:{TAG}"


IMAGES = (
    Image(
        "controller",
        "operator, gateway, webhook, sidecar and command line",
        packages=("flyer[kube]",),
    ),
    Image(
        "collectives",
        "HFReduce and the launcher, copied into training pods",
        packages=("flyer", "hfreduce"),
        dependencies=False,
        not_started=("flyer-operator", "flyer-sidecar", "flyer-webhook"),
    ),
    Image(
        "node-agent",
        "device plugin and health",
        packages=("flyer-node",),
    ),
    Image(
        "storage",
        "services of 3FS and the CSI driver",
        packages=("threefs[csi]",),
    ),
    Image("train", "stands for a user's image: Python, and torch mounted from the host"),
    Image("csi-provisioner", "the CSI project's sidecar", programs=("csi-provisioner",)),
    Image("csi-resizer", "the CSI project's sidecar", programs=("csi-resizer",)),
    Image(
        "csi-node-driver-registrar",
        "registers a CSI driver with its kubelet",
        programs=("csi-node-driver-registrar",),
        user=0,  # as the project's own
    ),
    Image(
        "livenessprobe",
        "a CSI driver's health over HTTP",
        programs=("livenessprobe",),
        user=0,  # likewise
    ),
)
