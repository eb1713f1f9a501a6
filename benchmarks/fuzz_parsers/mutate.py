"""This module changes bytes and JSON at random, the same way for the same random numbers."""

from __future__ import annotations

import json
import random
from typing import Any

ODD_BYTES = (
    b"\x00",
    b"\xff",
    b"\n",
    b'"',
    b"{",
    b"[",
    b"\\ud800",
    b"\xef\xbb\xbf",
    b"NaN",
    b"1e999",
)
ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "\ud800", "a\x00b",
    [], {}, [[]], [None], {"": None}, "9" * 5000,
)  # fmt: skip
MAX_CHANGES = 4


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with one to four changes of bytes, or of its structure where it is JSON."""
    if chance.random() < 0.5 and (changed := _restructured(data, chance)) is not None:
        return changed
    for _ in range(chance.randint(1, MAX_CHANGES)):
        data = _byte_change(data, chance)
    return data


def _byte_change(data: bytes, chance: random.Random) -> bytes:
    start = chance.randint(0, len(data))
    end = min(len(data), start + chance.choice((1, 1, 2, 8, 64)))
    match chance.randrange(5):
        case 0:  # a flipped bit
            flipped = bytes(byte ^ 1 << chance.randrange(8) for byte in data[start : start + 1])
            return data[:start] + flipped + data[start + 1 :]
        case 1:
            return data[:start] + data[end:]
        case 2:
            return data[:start] + chance.choice(ODD_BYTES) + data[start:]
        case 3:
            return data[:end] + data[start:end] + data[end:]
        case _:
            return data[:start]


def _restructured(data: bytes, chance: random.Random) -> bytes | None:
    """Return JSON, or JSON lines, with one value replaced, removed or repeated; None for others."""
    lines = data.split(b"\n")
    number = chance.randrange(len(lines))
    for parts, at in ((lines, number), ([data], 0)):
        try:
            tree = json.loads(parts[at])
        except (ValueError, RecursionError):
            continue
        parts[at] = json.dumps(_change(tree, chance)).encode()
        return b"\n".join(parts)
    return None


def _change(tree: Any, chance: random.Random) -> Any:
    if isinstance(tree, (dict, list)) and tree and chance.random() < 0.85:
        key = chance.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        match chance.randrange(6):
            case 0:
                del tree[key]
            case 1 if isinstance(tree, list):
                tree.append(tree[key])
            case _:
                tree[key] = _change(tree[key], chance)
        return tree
    return chance.choice(ODD_VALUES)
