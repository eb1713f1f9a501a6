"""The pages of the documentation, taken apart: fenced blocks, inline code, commands.

A command is a list of words. In a synopsis, brackets mark what may be left out: what they hold is kept,
so that it is checked too.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("mrl", "make", "python", "python3", "pytest", "torchrun", "bash", "sbatch")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int
    """The line of the page where its text begins."""


@dataclass(frozen=True)
class Command:
    """A command of a page, without assignments of variables before it."""

    place: str
    """`docs/view.md:4`."""
    words: tuple[str, ...]
    is_mention: bool
    """Inline code, which may leave out arguments: `mrl why`."""

    def __str__(self) -> str:
        return f"{self.place}: {' '.join(self.words)}"


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def blocks(self) -> list[Block]:
        found = re.finditer(r"^```(\w*)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        return [Block(m[1], m[2], self.text[: m.start(2)].count("\n") + 1) for m in found]

    def inline(self) -> Iterator[tuple[str, int]]:
        """(text, line) of the inline code outside of fenced blocks."""
        prose = re.sub(
            r"^```.*?^```$",
            lambda m: "\n" * m[0].count("\n"),
            self.text,
            flags=re.MULTILINE | re.DOTALL,
        )
        for match in re.finditer(r"`([^`]+)`", prose):
            yield " ".join(match[1].split()), prose[: match.start()].count("\n") + 1

    def commands(self) -> Iterator[Command]:
        for block in self.blocks:
            if block.language in ("bash", "sh", ""):
                for i, line in enumerate(block.text.replace("\\\n", "  ").splitlines()):
                    yield from _command(f"{self.name}:{block.line + i}", line, is_mention=False)
        for text, line in self.inline():
            yield from _command(f"{self.name}:{line}", text, is_mention=True)


def _command(place: str, line: str, *, is_mention: bool) -> Iterator[Command]:
    line = re.sub(r"\s#\s.*|^#.*", "", line.strip())
    try:
        words = shlex.split(line)
    except ValueError:  # prose with an apostrophe
        return
    while words and ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    if "||" in words:
        words = words[: words.index("||")]
    if not words:
        return
    words[0] = words[0].removeprefix(".venv/bin/")
    if words[0] in PROGRAMS or words[0].startswith("launch/"):
        words = [words[0], *(word.strip("[]") for word in words[1:])]
        yield Command(place, tuple(w for w in words if w not in ("", "...")), is_mention)


@cache
def pages() -> list[Page]:
    """README.md, CONTRIBUTING.md, CHANGELOG.md and everything in docs/."""
    top = [
        path
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
        if (path := ROOT / name).exists()
    ]
    return [Page(path) for path in (*top, *sorted((ROOT / "docs").glob("*.md")))]
