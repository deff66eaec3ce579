"""Conditions in Kubernetes' common form (KEP-1623): one positive statement per type."""

# ruff: noqa: TC001 - pydantic resolves the annotations

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flyer.api.base import Model
from flyer.api.rules import list_map
from flyer.api.timestamps import Timestamp

MESSAGE_CHARS_MAX = 32_768


class Condition(Model):
    """Condition of the object. Programs read its reason, users its message."""

    type: str = Field(
        min_length=1, max_length=316, description="Type of the condition in CamelCase."
    )
    status: Literal["True", "False", "Unknown"] = Field(
        description="Whether the condition holds: True, False or Unknown."
    )
    reason: str = Field(
        max_length=1024, description="Reason of the status as one word in CamelCase."
    )
    message: str = Field(
        default="",
        max_length=MESSAGE_CHARS_MAX,
        description="Human-readable details of the condition, with names and numbers.",
    )
    last_transition_time: Timestamp = Field(
        description="Time at which the status of the condition last changed."
    )
    observed_generation: int | None = Field(
        default=None, ge=0, description="The metadata.generation that the condition describes."
    )


Conditions = Annotated[
    tuple[Condition, ...],
    Field(
        max_length=32,
        description="Conditions of the object, at most one of each type.",
        json_schema_extra=list_map("type"),
    ),
]

__all__ = ["MESSAGE_CHARS_MAX", "Condition", "Conditions"]
