"""`python -m scripts.release [--output FOLDER]`: build and check what a release publishes.

Nothing is published: RELEASE.md lists the commands that do so. The folder holds the wheels, the
packaged chart, one software bill of materials (CycloneDX 1.5) each for Python and Rust, the list of
images, and SHA256SUMS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from charts import helm

__all__ = ["ReleaseError", "images", "main", "release_version", "rust_components"]

ROOT: Final = Path(__file__).resolve().parents[1]
UV: Final = ROOT / "build" / "tools" / "bin" / "uv"
STEP_SECONDS: Final = 1800


class ReleaseError(Exception):
    """The tree is not in a state that can be released."""


def main() -> int:
    """Build the release; exit status 1 with a message where the tree is not ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "release")
    output: Path = parser.parse_args().output.resolve()
    try:
        version = release_version(ROOT)
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        _wheels(output, version)
        _run(helm.find(), "package", str(ROOT / "charts" / "fire-flyer"), "-d", str(output))
        _bills_of_materials(output, version)
        (output / "images.txt").write_text("".join(f"{name}\n" for name in images(version)))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(output.iterdir())
    ]
    (output / "SHA256SUMS").write_text("".join(sums))
    for path in sorted(output.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.relative_to(Path.cwd())}")
    return 0


def release_version(root: Path) -> str:
    """The version that every part states and that the changelog describes.

    Raises ReleaseError with all differing parts.
    """
    manifests = ["operator", "deviceplugin", "collectives/python", "csi-3fs/python", "."]
    versions = {
        f"{folder}/pyproject.toml": _toml(root / folder / "pyproject.toml")["project"]["version"]
        for folder in manifests
    }
    cargo = _toml(root / "Cargo.toml")["workspace"]["package"]["version"]
    versions["Cargo.toml"] = cargo
    chart = YAML(typ="safe").load(root / "charts" / "fire-flyer" / "Chart.yaml")
    versions["Chart.yaml version"] = chart["version"]
    versions["Chart.yaml appVersion"] = chart["appVersion"]
    different = {name: value for name, value in versions.items() if value != cargo}
    if different:
        parts = ", ".join(f"{name} has {value}" for name, value in different.items())
        raise ReleaseError(f"versions differ: Cargo.toml has {cargo}, {parts}")
    changelog = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## (Unreleased|{re.escape(cargo)}\b)", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no section for {cargo} and none that is unreleased")
    return str(cargo)


def images(version: str) -> list[str]:
    """Name and tag of every image that a Containerfile builds."""
    files = sorted((ROOT / "images").glob("*.Containerfile"))
    return [f"fireflyer/{file.stem}:{version}" for file in files]


def rust_components(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """CycloneDX components of all packages that `cargo metadata` resolved, workspace excluded."""
    members = set(metadata["workspace_members"])
    return [
        {
            "type": "library",
            "name": package["name"],
            "version": package["version"],
            "purl": f"pkg:cargo/{package['name']}@{package['version']}",
            "licenses": [{"expression": package["license"]}] if package.get("license") else [],
        }
        for package in sorted(metadata["packages"], key=lambda p: (p["name"], p["version"]))
        if package["id"] not in members
    ]


def _wheels(output: Path, version: str) -> None:
    for package in ("flyer", "flyer-node", "hfreduce", "threefs"):
        _run(str(UV), "build", "--quiet", "--wheel", "--package", package, "-o", str(output))
    wheels = sorted(output.glob("*.whl"))
    if len(wheels) != 4 or any(f"-{version}-" not in wheel.name for wheel in wheels):
        names = ", ".join(wheel.name for wheel in wheels)
        raise ReleaseError(f"expected four wheels of version {version}, built {names or 'none'}")
    (output / ".gitignore").unlink(missing_ok=True)


def _bills_of_materials(output: Path, version: str) -> None:
    python = _run(
        str(UV), "export", "--quiet", "--frozen", "--all-packages", "--no-dev",
        "--format", "cyclonedx1.5",
    )  # fmt: skip
    (output / "sbom-python.cdx.json").write_text(python)
    metadata = json.loads(_run("cargo", "metadata", "--locked", "--format-version", "1"))
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "name": "fire-flyer", "version": version}
        },
        "components": rust_components(metadata),
    }
    (output / "sbom-rust.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")


def _run(*command: str) -> str:
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=STEP_SECONDS, check=False
    )
    if result.returncode != 0:
        raise ReleaseError(f"`{' '.join(command)}` failed: {result.stderr.strip()[-2000:]}")
    return result.stdout


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
