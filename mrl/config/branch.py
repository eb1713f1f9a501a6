"""`Branch`, the base class of all sections of a recipe. Its instances are frozen, and unknown keys are
refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

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
        """Raise ValueError if a number is expected and the value is a boolean or a quoted number, which
        pydantic would convert to a number. Raise it also if the value of a section with free keys
        has a part that JSON does not have, because the recipe is saved and sent as JSON."""
        _refuse_conversion(cls.model_fields[str(info.field_name)].annotation, value)
        return value


def _refuse_conversion(annotation: Any, value: Any) -> None:
    """Raise ValueError if `value`, or a part of it, would be converted to a number or is not JSON.
    `annotation` is the type that is expected."""
    members = list(_members(annotation))
    words = [word for each in members if get_origin(each) is Literal for word in get_args(each)]
    others = {each for each in members if get_origin(each) is not Literal} - {
        int,
        float,
        type(None),
    }
    if {int, float} & set(members) and not others:
        is_text = isinstance(value, str) and _NUMBER.fullmatch(value)
        if is_text or isinstance(value, bool):
            kinds = " or ".join(["a number" + " without quotes" * bool(is_text), *map(str, words)])
            raise ValueError(f"expected {kinds}")
    for member in members:
        if get_origin(member) is tuple and isinstance(value, (list, tuple)):
            for part in value:
                _refuse_conversion(get_args(member)[0], part)
        if get_origin(member) is dict and isinstance(value, dict):
            for key, part in value.items():
                if get_args(member)[1] is Any:
                    _refuse_not_json(part, str(key))
                else:
                    _refuse_conversion(get_args(member)[1], part)


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, or the type itself, without their constraints (`Annotated`)."""
    if get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _members(each)
    else:
        yield get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _refuse_not_json(value: Any, place: str) -> None:
    """Raise ValueError if `value` has a part that JSON does not have: a date, NaN, infinity, or a key
    that is not text. `place` is the dotted key of the value."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{place}: the key {key!r} is no text; write it in quotes")
            _refuse_not_json(part, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for part in value:
            _refuse_not_json(part, place)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place} is {value}; expected a finite number")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(
            f"{place} is of the type {type(value).__name__}, expected a number, text, a list, a "
            "mapping, true, false or null; put a date in quotes"
        )


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
