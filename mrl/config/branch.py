"""Defines what every branch of the recipe is: frozen, without unknown keys."""

from __future__ import annotations

import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_NUMBER = re.compile(r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)\s*")
"""A number in quotes, but not one with an exponent, as YAML 1.1 reads `1e-6` without quotes as text."""


class Branch(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_other_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` and text for a number; pydantic would convert them."""
        is_text = isinstance(value, str) and _NUMBER.fullmatch(value)
        if (is_text or isinstance(value, bool)) and _is_number(cls, str(info.field_name)):
            raise ValueError("expected a number" + " without quotes" * bool(is_text))
        return value


def _is_number(branch: type[BaseModel], name: str) -> bool:
    """Whether a field accepts only a number or null."""
    annotation = branch.model_fields[name].annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = set(get_args(annotation)) if is_union else {annotation}
    return bool(kinds & {int, float}) and kinds <= {int, float, type(None)}


def one_or_several(value: Any) -> Any:
    """Return a tuple of the text where a recipe gives one text in the place of a list."""
    return (value,) if isinstance(value, str) else value
