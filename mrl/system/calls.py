"""Says whether a function of the user's can be called with the columns of a row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any


def why_not(
    function: Callable[..., Any],
    num_positional: int,
    names: Iterable[str],
    *,
    is_unbound: bool = False,
) -> str:
    """Return why Python would refuse to call `function` with this many arguments by position and these
    names as keywords; empty where it would not, or has no signature to tell from.

    Arguments that are missing are not looked for. The `self` of a method or of an object that is called
    is an argument by position, too; `is_unbound`: `function` is a method without its object.
    """
    num_positional += is_unbound
    if inspect.ismethod(function):
        function, num_positional = function.__func__, num_positional + 1
    elif not inspect.isroutine(function) and not isinstance(function, (type, functools.partial)):
        function, num_positional = type(function).__call__, num_positional + 1
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind_partial(*[None] * num_positional, **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return ""


def column_to_blame(
    function: Callable[..., Any],
    num_positional: int,
    columns: Collection[str],
    given: Collection[str] = (),
    *,
    is_unbound: bool = False,
) -> str | None:
    """Return the first column that `function` cannot be called with, beside `num_positional` arguments
    by position and those that are `given` by name; None where it takes all of them."""
    if not why_not(function, num_positional, {*columns, *given}, is_unbound=is_unbound):
        return None
    for name in columns:
        if why_not(function, num_positional, (name,), is_unbound=is_unbound):
            return name
    return None
