"""Defines what every branch of the recipe is: frozen, without unknown keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Branch(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def one_or_several(value: Any) -> Any:
    """Return a tuple of the text where a recipe gives one text in the place of a list."""
    return (value,) if isinstance(value, str) else value
