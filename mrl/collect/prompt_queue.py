"""The prompts that a collector generates next: those restored by a resume, then new ones."""

from __future__ import annotations

from collections.abc import Iterable

from mrl.data import PromptCursor
from mrl.run.pending_prompts import PendingPrompt
from mrl.types import Prompt, SampleGroup


class PromptQueue:
    """The next prompts: those that start over after a resume, then those of the cursor."""

    def __init__(self, cursor: PromptCursor) -> None:
        self._cursor = cursor
        self._first: list[Prompt] = []

    def next(self, num: int) -> list[Prompt]:
        """Return the next `num` prompts."""
        found, self._first = self._first[:num], self._first[num:]
        return found + self._cursor.next(num - len(found))

    def put_first(self, waiting: Iterable[PendingPrompt]) -> None:
        """Put these prompts first, without the samples that were generated for them."""
        self._first = [*(one.group.prompt for one in waiting), *self._first]

    @property
    def waiting(self) -> list[PendingPrompt]:
        """Return the prompts that start over and have not been drawn again yet."""
        return [PendingPrompt(SampleGroup(prompt, [])) for prompt in self._first]
