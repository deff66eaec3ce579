"""Conditions, in Kubernetes' common form (KEP-1623): one fact a type, positive, with its reason."""

# ruff: noqa: TC001 - pydantic resolves the annotations

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flyer.api.base import Model
from flyer.api.rules import list_map
from flyer.api.timestamps import Timestamp

MESSAGE_CHARS_MAX = 32_768


class Condition(Model):
    """One fact about the object; reasons are words for programs, messages for people."""

    type: str = Field(
        min_length=1, max_length=316, description="What the fact is about, in CamelCase"
    )
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds")
    reason: str = Field(max_length=1024, description="Why, as one CamelCase word")
    message: str = Field(
        default="", max_length=MESSAGE_CHARS_MAX, description="Why, with names and numbers"
    )
    last_transition_time: Timestamp = Field(description="When `status` changed last")
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that this fact is about"
    )


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=32,
        description="Facts by type, each with a reason and since when",
        json_schema_extra=list_map("type"),
    ),
]

__all__ = ["MESSAGE_CHARS_MAX", "Condition", "Conditions"]
