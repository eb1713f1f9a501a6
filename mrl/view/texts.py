"""A sample in one line: the ends of its prompt and of its completion."""

from __future__ import annotations

from typing import Any

MAX_TEXT = 60
"""At most this many characters are shown of the prompt, and of the completion."""
MAX_READ = 20 * MAX_TEXT
"""Only so many characters at the end of a text are looked at, because a text may be very long."""


def ends_of(prompt: Any, completion: Any) -> str | None:
    """Return the ends of prompt and completion in one string, at most MAX_TEXT characters of each.

    Returns None if both prompt and completion are missing.
    """
    if isinstance(prompt, list):  # messages: the last one is the question
        prompt = prompt[-1].get("content") if prompt and isinstance(prompt[-1], dict) else None
    if prompt is None and completion is None:
        return None
    return f"{_end(prompt)} \u2192 {_end(completion)}"


def _end(text: Any) -> str:
    text = str(text or "")
    words = " ".join(text[-MAX_READ:].split())
    is_whole = len(text) <= MAX_READ and len(words) <= MAX_TEXT
    return words if is_whole else f"...{words[-MAX_TEXT:]}"
