"""What a reward function is, and how one fails."""

from __future__ import annotations

from collections.abc import Awaitable
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


class RewardFunction(Protocol):
    def __call__(
        self, prompts: list[Any], completions: list[str], **columns: list[Any]
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Score the G completions of one prompt.

        `prompts` repeats the row's prompt (string or messages) G times; so does each of
        `columns` with its own value. `columns["completion_ids"]` holds the G lists of token ids.
        Returns G finite numbers, with None for a sample that has no reward. May be called again for
        single samples (G = 1) when a call fails: it must not depend on the rest of the group.

        A method `start_worker()`, without arguments, is optional: it is called once in the worker
        process before the first call, for what takes long or must not be loaded in the trainer.
        """
        ...
