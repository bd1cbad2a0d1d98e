"""Base class of all sections of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, JsonValue
from pydantic.fields import FieldInfo

LONGEST = 1e6
"""Largest timeout in seconds, because operating systems count the milliseconds of a timeout in 31 bits."""


STATE: dict[str, JsonValue] = {"state": True}
"""`json_schema_extra` of a field that the program sets. A recipe cannot set it. It is saved with the recipe in
config.json and in checkpoints."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


def is_state(field: FieldInfo) -> bool:
    return field.json_schema_extra == STATE


def section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the section class of a field that is a nested section; None for other fields."""
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
