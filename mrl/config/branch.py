"""`Branch`, the base class of all sections of a recipe. Its instances are frozen, and unknown keys are
refused."""

from __future__ import annotations

import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

_NUMBER = re.compile(r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)\s*")
"""Matches a string that looks like a number. YAML returns such a string only if the number is in
quotes. Numbers with an exponent are not matched, because YAML 1.1 reads `1e-6` as a string even
without quotes."""


class Branch(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversion(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError if the field accepts only numbers and the value is a boolean or a quoted
        number, which pydantic would convert to a number."""
        is_text = isinstance(value, str) and _NUMBER.fullmatch(value)
        if (is_text or isinstance(value, bool)) and _is_number(cls, str(info.field_name)):
            raise ValueError("expected a number" + " without quotes" * bool(is_text))
        return value


def _is_number(branch: type[BaseModel], name: str) -> bool:
    """Return whether the field `name` of the class `branch` accepts only numbers, and perhaps null."""
    annotation = branch.model_fields[name].annotation
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = set(get_args(annotation)) if is_union else {annotation}
    return bool(kinds & {int, float}) and kinds <= {int, float, type(None)}


def one_or_several(value: Any) -> Any:
    """Return a string as a 1-tuple, and any other value unchanged."""
    return (value,) if isinstance(value, str) else value


def as_words(value: Any) -> Any:
    """Return the words of a command: a string as a list with one word, a number in a list or tuple as
    its text, and anything else unchanged."""
    words = one_or_several(value)
    if not isinstance(words, (list, tuple)):
        return words
    return [str(word) if type(word) in (int, float) else word for word in words]


def off_as_word(value: Any) -> Any:
    """Return "off" for False, because YAML 1.1 reads a bare `off` as false; other values unchanged."""
    return "off" if value is False else value
