"""Checks everything that can be known before the start, cheapest first; every failure is one line.

`check` makes a `Plan` of a recipe, or raises InputError with what is wrong and what to do.
"""

from mrl.preflight.check import check, load_tokenizer
from mrl.preflight.plan import Plan

__all__ = ["Plan", "check", "load_tokenizer"]
