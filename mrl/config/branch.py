"""The base class of all sections of the recipe. A section (`Branch`) is frozen and refuses unknown
keys."""

from __future__ import annotations

import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_NUMBER = re.compile(r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)\s*")
"""Matches a string that is written like a number. YAML reads such a number as a string only if it
is in quotes. Numbers with an exponent are not matched, because YAML 1.1 reads `1e-6` as a string
even without quotes."""


class Branch(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversion(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError if the field is a number and the value is a boolean or a quoted number.
        Pydantic would convert both to numbers."""
        is_text = isinstance(value, str) and _NUMBER.fullmatch(value)
        if (is_text or isinstance(value, bool)) and _is_number(cls, str(info.field_name)):
            raise ValueError("expected a number" + " without quotes" * bool(is_text))
        return value


def _is_number(branch: type[BaseModel], name: str) -> bool:
    """Return whether a field accepts only a number or null."""
    annotation = branch.model_fields[name].annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = set(get_args(annotation)) if is_union else {annotation}
    return bool(kinds & {int, float}) and kinds <= {int, float, type(None)}


def one_or_several(value: Any) -> Any:
    """Return a string as a 1-tuple, and any other value unchanged."""
    return (value,) if isinstance(value, str) else value
