"""What a reward function is, and how one fails."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

HANG = "hang"
"""The kind of failure of a call without an answer; the others are below."""


class RewardError(ValueError):
    """The function did not return usable rewards."""

    kind = "exception"
    """The name of this kind of failure in `mrl reward test`."""


class BrokenReward(RewardError):
    """There is not one reward for each completion; scoring fewer at a time would hide it, or not
    help."""

    kind = "wrong type or length"


class NotANumber(RewardError):
    """One entry is neither a number nor None."""

    kind = "not a number"


class NotFinite(RewardError):
    """One entry is NaN or infinite, or would be as a float32."""

    kind = "NaN or infinite"


Entry = float | dict[str, float | None] | None
"""What a reward function returns for one sample: a number, parts by name, or None."""
TOTAL = "total"
"""The name of the part that is the reward itself; without it the reward is the sum of the parts."""


def total_of(entry: Entry) -> float | None:
    """Return the reward of one sample. Parts that are None do not count; None where all of them are."""
    if not isinstance(entry, dict):
        return entry
    if TOTAL in entry:
        return entry[TOTAL]
    known = [value for value in entry.values() if value is not None]
    return sum(known) if known else None


def parts_of(entry: Entry) -> dict[str, float | None]:
    """Return the named parts of one sample's entry, without its total."""
    return {k: v for k, v in entry.items() if k != TOTAL} if isinstance(entry, dict) else {}


class RewardFunction(Protocol):
    def __call__(
        self, prompts: list[Any], completions: list[str], /, **columns: list[Any]
    ) -> Sequence[Entry] | Awaitable[Sequence[Entry]]:
        """Score the G completions of one prompt.

        `prompts` repeats the row's prompt (string or messages) G times; so does each of
        `columns` with its own value. `columns["completion_ids"]` holds the G lists of token ids.
        Returns G finite numbers, with None for a sample that has no reward, and a dict of numbers for
        one whose reward has parts: their sum, or the part `total`, is the reward. May be called again
        for single samples (G = 1) when a call fails: it must not depend on the rest of the group.

        A method `start_worker()`, without arguments, is optional: it is called once in the worker
        process before the first call, for what takes long or must not be loaded in the trainer.
        """
        ...
