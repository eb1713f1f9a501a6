"""Format byte counts, large counts and durations for people."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Format bytes in decimal units with three significant digits: `1.23 GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3g} {unit}" if abs(num_bytes) < 999.5 * scale else (
                f"{num_bytes / scale:.0f} {unit}"
            )  # fmt: skip
    return f"{num_bytes:.0f} B"


def count(num: float) -> str:
    """Format a count with up to four significant digits: `30.53 B`, `8.192 k`."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if num >= scale:
            return f"{num / scale:.4g} {unit}"
    return f"{num:.4g}"


def duration(seconds: float) -> str:
    """Format seconds with three significant digits: `1.2 s`, `34 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
