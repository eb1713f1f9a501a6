"""Checks whether a user's function accepts certain arguments, such as the columns of a data set."""

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
    """Return Python's reason for refusing a call of `function`; empty if Python accepts the call.

    The call has `num_positional` positional arguments and the keyword arguments `names`. Missing
    arguments are not reported, and a function without a signature is accepted. `num_positional`
    does not count `self`. One argument is added for `self` if `function` is a bound method or a
    callable object, or if `is_unbound` says that `function` is an unbound method.
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


def unaccepted_column(
    function: Callable[..., Any],
    num_positional: int,
    columns: Collection[str],
    given: Collection[str] = (),
    *,
    is_unbound: bool = False,
) -> str | None:
    """Return the first column that `function` does not accept as a keyword argument, or None.

    In addition to the columns, the function is called with `num_positional` positional arguments
    and the keyword arguments `given`. `num_positional` does not count `self`; `is_unbound` says
    whether `function` is an unbound method.
    """
    if not why_not(function, num_positional, {*columns, *given}, is_unbound=is_unbound):
        return None
    for name in columns:
        if why_not(function, num_positional, (name,), is_unbound=is_unbound):
            return name
    return None
