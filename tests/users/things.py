"""What users do, and what comes of it: `python -m tests.users [WORDS]` tries all and prints a table.

Each file of this folder adds the things of one area, as functions with the decorator `thing`. A thing
does with real commands what its text says, asserts the outcome, and returns it in words.
tests/users/test_things.py tries the short ones in `make test` and all of them in `make test-all`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.loop.conftest import COMMAND_TIMEOUT_S, REPOSITORY, TOY_RECIPE, Toy, environment
from tests.loop.forked import Command


@dataclass
class User:
    """A user sits in an empty folder, with a toy model and the toy recipe."""

    folder: Path
    toy: Toy
    _num_commands: int = field(default=0, init=False)

    def mrl(self, *arguments: str | Path, code: int = 0, **env: str) -> str:
        """Run `mrl ARGUMENTS` and return what it printed, stdout before stderr.

        Asserts that its exit code is `code`.
        """
        done = self.start(*arguments, **env).finish(COMMAND_TIMEOUT_S)
        printed = done.stdout + done.stderr
        assert done.returncode == code, f"mrl {' '.join(done.args)}: {done.returncode}\n{printed}"
        return printed

    def start(self, *arguments: str | Path, **env: str) -> Command:
        """Start `mrl ARGUMENTS`, to be killed or waited for."""
        self._num_commands += 1
        out = self.folder / f"printed_{self._num_commands}"
        return Command(
            [str(argument) for argument in arguments], environment(**env), out, self.folder
        )

    def train(self, output: str, *more: str, code: int = 0, **env: str) -> str:
        """Run `mrl train` on the toy recipe into the folder `output`, with small steps."""
        return self.mrl("train", *self.recipe(output, *more), code=code, **env)

    def recipe(self, output: str, *more: str) -> list[str]:
        """Return the toy recipe with overrides for small steps, as arguments of a command."""
        data = f"data.path={REPOSITORY / 'launch/recipes/data/first_char.jsonl'}"
        return [str(TOY_RECIPE), data, *self.toy.overrides(self.folder / output, *more)]

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file


Do = Callable[[User], str]


@dataclass(frozen=True)
class Thing:
    """A thing that a user does."""

    text: str
    do: Do
    is_long: bool
    wall: str | None
    """What stood in the way of new users, and is gone where this ends as it should."""


THINGS: list[Thing] = []


def thing(text: str, *, is_long: bool = True, wall: str | None = None) -> Callable[[Do], Do]:
    """Add a function to the list. `text` is a sentence from the user's side.

    `is_long` keeps it out of `make test`, which has room for what takes a second or two.
    """

    def add(do: Do) -> Do:
        THINGS.append(Thing(text, do, is_long, wall))
        return do

    return add
