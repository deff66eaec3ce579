"""The part of a PodTemplateSpec that one machine needs; the rest is kept for Kubernetes."""

# ruff: noqa: RUF012 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from typing import Any

from pydantic import Field

from flyer.api.base import OpenModel, StrictModel


class EnvVar(OpenModel):
    """One environment variable; `valueFrom` works on Kubernetes alone."""

    name: str = Field(min_length=1)
    value: str | None = None


class Container(OpenModel):
    """One container. The first of a pod (or the one named `trainer`) runs the ranks."""

    name: str = Field(min_length=1)
    image: str | None = None
    command: list[str] = []
    args: list[str] = []
    env: list[EnvVar] = []
    working_dir: str | None = None


class PodSpec(OpenModel):
    """What runs on each node."""

    containers: list[Container] = Field(min_length=1)
    volumes: list[dict[str, Any]] = []


class TemplateMetadata(OpenModel):
    """Labels and annotations of the pods."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class PodTemplate(StrictModel):
    """The pod of one node, the same for all nodes of the gang."""

    metadata: TemplateMetadata = TemplateMetadata()
    spec: PodSpec

    @property
    def trainer(self) -> Container:
        """The container whose command every rank runs."""
        named = [one for one in self.spec.containers if one.name == "trainer"]
        return (named or self.spec.containers)[0]


__all__ = ["Container", "EnvVar", "PodSpec", "PodTemplate", "TemplateMetadata"]
