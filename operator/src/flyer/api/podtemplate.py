"""The fields of a PodTemplateSpec that the local driver reads; others are kept for Kubernetes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from flyer.api.base import OpenModel, StrictModel
from flyer.api.rules import list_map


class EnvVar(OpenModel):
    """Environment variable. `valueFrom` is supported only on Kubernetes."""

    name: str = Field(min_length=1, description="Name of the environment variable.")
    value: str | None = Field(default=None, description="Value of the environment variable.")


class Container(OpenModel):
    """Container of a pod. The first one (or the one named `trainer`) runs the ranks."""

    name: str = Field(min_length=1, description="Name of the container in the pod.")
    image: str | None = Field(
        default=None, description="Container image. It is required only on Kubernetes."
    )
    command: list[str] = Field(default=[], description="Command that every rank runs.")
    args: list[str] = Field(default=[], description="Arguments of the command.")
    env: list[EnvVar] = Field(
        default=[], description="Environment variables, in addition to those of the rank."
    )
    working_dir: str | None = Field(default=None, description="Working directory of the command.")


class PodSpec(OpenModel):
    """Specification of the pod that runs on each node."""

    containers: list[Container] = Field(
        min_length=1,
        description="Containers of the pod. The one named trainer, otherwise the first, runs "
        "the ranks.",
        json_schema_extra=list_map("name"),
    )
    volumes: list[dict[str, Any]] = Field(
        default=[], description="Volumes of the pod, as in core/v1."
    )


class TemplateMetadata(OpenModel):
    """Labels and annotations of the pods."""

    labels: dict[str, str] = Field(default={}, description="Labels of the created pods.")
    annotations: dict[str, str] = Field(default={}, description="Annotations of the created pods.")


class PodTemplate(StrictModel):
    """The pod of one node, the same for all nodes of the gang."""

    metadata: TemplateMetadata = Field(
        default=TemplateMetadata(), description="Labels and annotations of the pods."
    )
    spec: PodSpec = Field(description="Specification of the pod, as in core/v1.")

    @property
    def trainer(self) -> Container:
        """The container whose command every rank runs."""
        named = [container for container in self.spec.containers if container.name == "trainer"]
        return (named or self.spec.containers)[0]


__all__ = ["Container", "EnvVar", "PodSpec", "PodTemplate", "TemplateMetadata"]
