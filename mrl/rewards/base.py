"""The interface of a reward function, and the ways in which a reward function can fail."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

HANG = "hang"
"""Name of the kind of failure in which a call does not return in time. The exceptions below name the
other kinds in their attribute `kind`."""


class RewardError(ValueError):
    """A reward function did not return usable rewards."""

    kind = "exception"
    """Name of this kind of failure in `mrl reward test`."""


class BrokenReward(RewardError):
    """A reward function did not return a list with one reward per completion.

    The call is not repeated with fewer completions, because that could hide the error and would not
    fix it.
    """

    kind = "wrong type or length"


class NotANumber(RewardError):
    """A reward function returned a list in which a reward is neither a number nor None."""

    kind = "not a number"


class NotFinite(RewardError):
    """A reward function returned a reward that is NaN or infinite, or would be infinite in float32."""

    kind = "NaN or infinite"


Entry = float | dict[str, float | None] | None
"""What a reward function returns for one sample: a number, a dict of named parts, or None for a
sample without a reward."""
TOTAL = "total"
"""Name of the part that is the reward itself. If it is missing, the reward is the sum of the parts."""


def total_of(entry: Entry) -> float | None:
    """Return the reward of one sample, given the entry that the reward function returned for it.

    If the entry is a dict, the reward is its part `total`. Without a part `total`, the reward is
    the sum of the parts that are not None, or None if all parts are None. Any other entry is the
    reward itself.
    """
    if not isinstance(entry, dict):
        return entry
    if TOTAL in entry:
        return entry[TOTAL]
    known = [value for value in entry.values() if value is not None]
    return sum(known) if known else None


def parts_of(entry: Entry) -> dict[str, float | None]:
    """Return the parts of one sample's reward by name, without the part `total`. `entry` is what
    the reward function returned for the sample. The result is empty if the reward has no parts."""
    return {k: v for k, v in entry.items() if k != TOTAL} if isinstance(entry, dict) else {}


class RewardFunction(Protocol):
    def __call__(
        self, prompts: list[Any], completions: list[str], /, **columns: list[Any]
    ) -> Sequence[Entry] | Awaitable[Sequence[Entry]]:
        """Score the G completions of one prompt.

        `prompts` contains the row's prompt (string or messages) G times, and each of `columns`
        contains the row's value G times. `columns["completion_ids"]` contains the G lists of token
        ids.

        Returns one entry per sample: a finite number, None for a sample without a reward, or a dict of
        named numbers for a reward with parts. The reward of a dict is its part `total` or, without
        such a part, the sum of its parts. If a call fails, the function may be called again with single
        samples (G = 1), so an entry must not depend on the rest of the group.

        A method `start_worker()` without arguments is optional. It is called once in the worker
        process, before the first call, to do slow initialisation or load what the trainer must not
        load.
        """
        ...
