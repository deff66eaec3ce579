"""The part of a PodTemplateSpec that one machine needs; the rest is kept for Kubernetes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from flyer.api.base import OpenModel, StrictModel
from flyer.api.rules import list_map


class EnvVar(OpenModel):
    """One environment variable; `valueFrom` works on Kubernetes alone."""

    name: str = Field(min_length=1, description="Its name")
    value: str | None = Field(default=None, description="Its value")


class Container(OpenModel):
    """One container. The first of a pod (or the one named `trainer`) runs the ranks."""

    name: str = Field(min_length=1, description="Its name in the pod")
    image: str | None = Field(default=None, description="Needed on Kubernetes alone")
    command: list[str] = Field(default=[], description="What every rank runs")
    args: list[str] = Field(default=[], description="Its arguments")
    env: list[EnvVar] = Field(default=[], description="Its environment, beside the rank's own")
    working_dir: str | None = Field(default=None, description="Where it runs")


class PodSpec(OpenModel):
    """What runs on each node."""

    containers: list[Container] = Field(
        min_length=1,
        description="The first one (or the one named trainer) runs the ranks",
        json_schema_extra=list_map("name"),
    )
    volumes: list[dict[str, Any]] = Field(default=[], description="As in any pod")


class TemplateMetadata(OpenModel):
    """Labels and annotations of the pods."""

    labels: dict[str, str] = Field(default={}, description="Labels of the pods")
    annotations: dict[str, str] = Field(default={}, description="Annotations of the pods")


class PodTemplate(StrictModel):
    """The pod of one node, the same for all nodes of the gang."""

    metadata: TemplateMetadata = Field(
        default=TemplateMetadata(), description="Labels and annotations of the pods"
    )
    spec: PodSpec = Field(description="As in any pod")

    @property
    def trainer(self) -> Container:
        """The container whose command every rank runs."""
        named = [container for container in self.spec.containers if container.name == "trainer"]
        return (named or self.spec.containers)[0]


__all__ = ["Container", "EnvVar", "PodSpec", "PodTemplate", "TemplateMetadata"]
