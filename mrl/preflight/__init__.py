"""Check everything that can be checked before a run starts, beginning with the cheapest checks.

`check` returns a `Plan` for a recipe, or raises InputError with a one-line message that says what is
wrong and what to do.
"""

from mrl.preflight.check import check, load_tokenizer
from mrl.preflight.plan import Plan

__all__ = ["Plan", "check", "load_tokenizer"]
