"""Inputs of the Containerfile builds; `make images-check` builds them."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

import pytest

from images import containerfiles
from images.commands import ImageError
from images.containerfiles import (
    Store,
    containerfile,
    entry_points,
    host_settings,
    host_variables,
    rust_version,
    why_not,
)
from images.contents import IMAGES, Image
from images.packages import ROOT
from images.stand_ins import STAND_INS

if TYPE_CHECKING:
    from pathlib import Path

OURS = [image for image in IMAGES if image.packages]


@pytest.mark.parametrize("image", OURS, ids=lambda image: image.name)
def test_every_base_image_has_a_local_replacement(image: Image) -> None:
    stages = re.findall(r"^FROM \$\{(\w+)\}", containerfile(image).read_text(), re.MULTILINE)
    assert stages
    assert set(stages) <= {base.argument for base in STAND_INS}


def test_a_replacement_contains_no_more_than_the_official_image() -> None:
    """The replacements must not hide a missing package from the checks."""
    python, rust = STAND_INS
    assert not {"gcc", "build-essential"} & set(python.packages)
    assert not [name for name in rust.packages if name.startswith("python")]


def test_the_toolchain_is_that_of_the_workspace() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    assert rust_version() == f"{workspace['package']['rust-version']}.0"


@pytest.mark.parametrize("image", OURS, ids=lambda image: image.name)
def test_every_entry_point_is_started_or_named_as_an_exception(image: Image) -> None:
    started = entry_points(image)
    assert started
    assert not set(started) & set(image.not_started)


def test_the_collectives_image_starts_what_pods_run_of_it() -> None:
    [image] = [item for item in OURS if item.name == "collectives"]
    additions = (ROOT / "operator/src/flyer/kube/pods/additions.py").read_text()
    run = set(re.findall(r'"command": \["([a-z-]+)"', additions))
    assert {"flyer-install", "hfreduced"} <= run
    assert {"flyer-install", "hfreduced"} <= set(entry_points(image))


def test_settings_of_the_host_are_passed_on_but_never_its_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".cargo" / "registry").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("CARGO_HOME", "/home/other/.cargo")
    monkeypatch.setenv("PATH_TO_PIP_X", "1")
    flags = host_settings()
    assert "PIP_INDEX_URL" in host_variables()
    assert not {"CARGO_HOME", "PATH_TO_PIP_X"} & set(host_variables())
    assert f"--volume={tmp_path}/.cargo/registry:/usr/local/cargo/registry:rw" in flags
    assert not [flag for flag in flags if "mirror.example" in flag]


def test_the_reason_why_a_machine_cannot_build_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in why_not()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "buildah" else "/bin/x")
    assert "buildah" in why_not()


def test_the_error_of_a_failed_build_contains_the_output_of_buildah(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "buildah").write_text("#!/bin/sh\necho 'COPY: no such file' >&2\nexit 125\n")
    (tmp_path / "buildah").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ImageError, match="COPY: no such file"):
        Store(tmp_path / "store").build(OURS[0])


def test_a_build_that_does_not_end_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "buildah").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "buildah").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(containerfiles, "BUILD_SECONDS", 0.2)
    with pytest.raises(ImageError, match=r"more than 0\.2 s"):
        Store(tmp_path / "store").build(OURS[0])
