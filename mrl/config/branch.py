"""Defines what every branch of the recipe is: frozen, without unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Branch(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
