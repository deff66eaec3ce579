"""Base of all models: camelCase in objects, snake_case in Python, immutable."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Model(BaseModel):
    """An immutable part of an object; unknown fields are refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
    )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed. The values must be valid: they are not checked again."""
        unknown = changes.keys() - type(self).model_fields.keys()
        assert not unknown, f"{type(self).__name__} has no field {sorted(unknown)}"
        return self.model_copy(update=changes)

    def to_object(self) -> dict[str, Any]:
        """The JSON form: camelCase, absent instead of null."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StrictModel(Model):
    """Parses manifests strictly: "4" is not a number and 1 is not a string."""

    model_config = ConfigDict(strict=True)


class OpenModel(StrictModel):
    """A type of the Kubernetes API: unknown fields are kept."""

    model_config = ConfigDict(extra="allow")


__all__ = ["Model", "OpenModel", "StrictModel"]
