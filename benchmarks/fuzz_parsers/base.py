"""This module says what a fuzzed parser is, and tries one input on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fuzz_parsers.mutate import mutated


class AcceptedDamage(Exception):
    """A parser returned what it should have refused."""


def require(condition: bool, what: str) -> None:
    """Raise AcceptedDamage with the text `what` unless the condition holds."""
    if not condition:
        raise AcceptedDamage(what)


@dataclass(frozen=True)
class Parser:
    """A `Parser` is one reader of bytes from outside mrl."""

    name: str
    seeds: tuple[bytes, ...]
    """Valid inputs, which the reader must accept."""
    read: Callable[[bytes, Path], None]
    """Reads an input, with a folder for its files, and requires that the result keeps its promises."""
    refusals: tuple[type[Exception], ...]
    """What it may raise on a damaged input."""
    share: float = 1.0
    """Its share of the time, relative to the shares of the other parsers."""


def input_of(parser: Parser, seed: int, number: int) -> bytes:
    """Return input `number` of a run with `seed`: the same bytes every time."""
    chance = random.Random(f"{seed}:{parser.name}:{number}")
    return mutated(chance.choice(parser.seeds), chance)


def fault_of(parser: Parser, data: bytes, folder: Path) -> str:
    """Return what is wrong with how the parser takes `data`; empty where nothing is."""
    try:
        parser.read(data, folder)
    except parser.refusals:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""
