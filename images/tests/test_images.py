"""Image archives are readable by other tools, and Containerfiles match the list of contents."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import tomllib
from pathlib import Path

import pytest

from images import packages
from images.contents import IMAGES, NON_ROOT, Image
from images.oci import Config, Layer, write_archive

FOLDER = Path(__file__).parents[1]
OURS = [image for image in IMAGES if image.packages]


@pytest.mark.parametrize("image", OURS, ids=lambda image: image.name)
def test_containerfile_has_the_same_packages_and_user(image: Image) -> None:
    text = (FOLDER / f"{image.name}.Containerfile").read_text()
    stages = [line for line in text.splitlines() if line.startswith("FROM ")]
    assert len(stages) == 3  # uv and the build tools are not copied
    assert f"USER {image.user}:{image.user}" in text
    sources = {"flyer": "operator", "flyer-node": "deviceplugin"}
    sources |= {"hfreduce": "collectives/python", "threefs": "csi-3fs/python"}
    for package in image.packages:
        name, _, extras = package.rstrip("]").partition("[")
        assert sources[name] in text
        if image.dependencies:
            assert f"--package {name}" in text
            assert all(f"--extra {extra}" in text for extra in extras.split(",") if extra)


def test_no_image_runs_as_root_by_default() -> None:
    assert {image.name for image in OURS if image.user != NON_ROOT} == set()


def test_bases_are_pinned() -> None:
    pinned = re.compile(r"docker\.io/library/[a-z]+:[0-9.]+[a-z-]*@sha256:[0-9a-f]{64}")
    for path in FOLDER.glob("*.Containerfile"):
        bases = re.findall(r"^ARG [A-Z]+=(.*)$", path.read_text(), re.MULTILINE)
        assert bases
        assert all(pinned.fullmatch(base) for base in bases), f"{path.name}: {bases}"
        stages = re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)
        assert set(stages) <= {"${BASE}", "${RUST}"}, f"{path.name}: {stages}"


def test_rust_is_the_version_that_the_workspace_needs() -> None:
    workspace = tomllib.loads((FOLDER.parent / "Cargo.toml").read_text())["workspace"]
    version = workspace["package"]["rust-version"]
    for path in FOLDER.glob("*.Containerfile"):
        text = path.read_text()
        if "FROM ${RUST}" in text:
            assert f"ARG RUST_VERSION={version}.0\n" in text, path.name
            assert "rustup default ${RUST_VERSION}" in text, path.name


def test_images_and_bootstrap_install_the_same_uv() -> None:
    pinned = re.search(r"^uv==(\S+)", (FOLDER / "uv.txt").read_text(), re.MULTILINE)
    bootstrap = (FOLDER.parent / "scripts/bootstrap").read_text()
    assert pinned
    assert f"UV_VERSION={pinned[1]}\n" in bootstrap


def test_an_archive_names_its_blobs_by_their_digest(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    with tarfile.open(tmp_path / "layer.tar", "w") as tar:
        tar.add(tmp_path / "file", "file")
    layer = Layer.compress(tmp_path / "layer.tar", tmp_path / "layer.tar.gz")
    assert Layer.load(layer.path) == layer
    with gzip.open(layer.path) as inner:
        assert layer.diff_id == f"sha256:{hashlib.sha256(inner.read()).hexdigest()}"

    config = Config(entrypoint=("/file",), environment={"A": "b"}, user="1:1")
    write_archive(tmp_path / "image.tar", "docker.io/x/y:z", [layer, layer], config)
    with tarfile.open(tmp_path / "image.tar") as archive:

        def blob(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file
            return file.read()

        for name in archive.getnames():
            if name.startswith("blobs/"):
                assert hashlib.sha256(blob(name)).hexdigest() == name.rpartition("/")[2]
        (entry,) = json.loads(blob("index.json"))["manifests"]
        assert entry["annotations"]["io.containerd.image.name"] == "docker.io/x/y:z"
        manifest = json.loads(blob("blobs/sha256/" + entry["digest"].removeprefix("sha256:")))
        inside = json.loads(
            blob("blobs/sha256/" + manifest["config"]["digest"].removeprefix("sha256:"))
        )
    assert inside["rootfs"]["diff_ids"] == [layer.diff_id] * 2
    assert len(inside["history"]) == 2
    assert inside["config"]["Env"] == ["A=b"]
    assert inside["config"]["User"] == "1:1"


def test_the_same_content_makes_the_same_archive_layer(tmp_path: Path) -> None:
    (tmp_path / "layer.tar").write_bytes(b"\0" * 10240)
    first = Layer.compress(tmp_path / "layer.tar", tmp_path / "a.gz")
    second = Layer.compress(tmp_path / "layer.tar", tmp_path / "b.gz")
    assert first.digest == second.digest


def test_two_concurrent_builds_of_one_wheel_give_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: str) -> str:
        folder = next(arg for arg in arguments if arg.startswith("--out-dir=")).partition("=")[2]
        other_folder = tmp_path / "wheels" / "flyer-key"
        for target in (Path(folder), other_folder):  # the other build ends while this one runs
            target.mkdir()
            (target / "flyer.whl").touch()
        return ""

    monkeypatch.setattr(packages, "source_key", lambda _: "key")
    monkeypatch.setattr(packages, "_uv", build)
    wheel = packages.wheel("flyer", tmp_path)
    assert wheel == tmp_path / "wheels" / "flyer-key" / "flyer.whl"
    assert [entry.name for entry in (tmp_path / "wheels").iterdir()] == ["flyer-key"]
