"""The fields of Kubernetes' metadata that the operator reads."""

# ruff: noqa: TC001, RUF012 - pydantic resolves the annotations, and copies the defaults

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from flyer.api.base import OpenModel
from flyer.api.timestamps import Timestamp

# A DNS label: it becomes part of host names and of folders.
LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
# The value of a label, except the empty one.
LABEL_VALUE = r"^[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?$"
# A DNS subdomain: what Kubernetes takes as the name of a node or of an object.
SUBDOMAIN = r"^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$"


class ObjectMeta(OpenModel):
    """Metadata of an object in a namespace."""

    name: str = Field(pattern=LABEL)
    namespace: str = Field(default="default", pattern=LABEL)
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: Annotated[Timestamp, Field(strict=False)] | None = None
    deletion_timestamp: Annotated[Timestamp, Field(strict=False)] | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class ClusterMeta(OpenModel):
    """Metadata of an object of the whole cluster."""

    name: str = Field(pattern=SUBDOMAIN)
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: Annotated[Timestamp, Field(strict=False)] | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


__all__ = ["LABEL", "LABEL_VALUE", "SUBDOMAIN", "ClusterMeta", "ObjectMeta"]
