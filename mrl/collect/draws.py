"""The prompts that a collector begins next: first those that a resume gives back, then new ones."""

from __future__ import annotations

from collections.abc import Iterable

from mrl.data import PromptCursor
from mrl.run.waiting import Waiting
from mrl.types import Prompt, SampleGroup


class Draws:
    """Gives the next prompts: those that begin anew after a resume, then those of the cursor."""

    def __init__(self, cursor: PromptCursor) -> None:
        self._cursor = cursor
        self._first: list[Prompt] = []

    def next(self, num: int) -> list[Prompt]:
        """Return the next `num` prompts."""
        found, self._first = self._first[:num], self._first[num:]
        return found + self._cursor.next(num - len(found))

    def put_first(self, waiting: Iterable[Waiting]) -> None:
        """Let the prompts of these be the next ones, without what was generated of them."""
        self._first = [*(one.group.prompt for one in waiting), *self._first]

    @property
    def waiting(self) -> list[Waiting]:
        """Return the prompts that start over and have not been drawn again yet."""
        return [Waiting(SampleGroup(prompt, [])) for prompt in self._first]
