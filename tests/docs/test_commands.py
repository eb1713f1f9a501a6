"""The commands that README.md, CONTRIBUTING.md and docs/ name can be given like that."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

from mrl import cli
from tests.docs.pages import ROOT, Command, pages
from tests.docs.recipe_keys import is_key

PLACEHOLDERS = {"STEP": "3", "N": "8", "A:B": "1:2", "S": "30", "A": "1", "B": "2"}
"""What stands in a page for a number."""
OVERRIDE = re.compile(r"([a-z_]+(?:\.\w+)*)=")
MAKE_OPTIONS = ("-j", "-n", "--jobs")


def mrl_problem(command: Command) -> str | None:
    """What the parser of `mrl` says; a mention may leave arguments out."""
    words = [PLACEHOLDERS.get(word, word) for word in command.words[1:]]
    try:
        cli._parse(words)
    except SystemExit as stop:
        is_missing = bool(words) and command.is_mention and _said.startswith("the following")
        if stop.code and not is_missing and not (command.is_mention and not words):
            return f"mrl says: {_said}"
    keys = [match[1] for word in words if (match := OVERRIDE.match(word)) and match[1] != "key"]
    wrong = [key for key in keys if not is_key(key)]
    return f"the recipe has no {wrong}" if wrong else None


_said = ""


@pytest.fixture
def parser_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser's one line goes into `_said`."""

    def error(self: object, message: str) -> None:
        global _said  # noqa: PLW0603
        _said = message
        raise SystemExit(2)

    monkeypatch.setattr("mrl.cli._Parser.error", error)
    monkeypatch.setattr("mrl.cli._parser", cache(cli._parser))  # it takes a tenth of a second


def make_problem(command: Command) -> str | None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", text, re.MULTILINE))
    words = [w for w in command.words[1:] if "=" not in w and not w.startswith(MAKE_OPTIONS)]
    unknown = sorted(set(words) - targets)
    variables = [w.split("=")[0] for w in command.words[1:] if "=" in w]
    unused = [v for v in variables if f"$({v})" not in text]
    if unknown:
        return f"the Makefile has no target {unknown}"
    return f"the Makefile reads no {unused}" if unused else None


def python_problem(command: Command) -> str | None:
    """`python -m module --option` or `python file.py --option`; no module is run."""
    words = list(command.words[1:])
    while words and words[0] in ("-W", "-u", "-X"):
        words = words[2 if words[0] != "-u" else 1 :]
    if not words:
        return None
    if words[0] == "-m" and len(words) > 1:
        if words[1] == "mrl.launch":
            return torchrun_problem(Command(command.place, tuple(words[1:]), command.is_mention))
        if words[1] == "pytest":
            return paths_problem(words[2:])
        if words[1] == "mrl":
            return mrl_problem(Command(command.place, ("mrl", *words[2:]), command.is_mention))
        if words[1] in ("pip", "venv"):
            return None
        file, options = ROOT / (words[1].replace(".", "/") + ".py"), words[2:]
        package = ROOT / words[1].replace(".", "/") / "__main__.py"
        file = package if package.exists() else file
    elif words[0].startswith("-"):
        return None
    else:
        file, options = ROOT / words[0], words[1:]
    if not file.is_file():
        name = str(file.relative_to(ROOT))
        is_written = any(text.startswith(f"# {name}\n") for text in _blocks())
        return None if is_written else f"{name} does not exist"
    source = file.read_text()
    given = [word.split("=")[0] for word in options if word.startswith("--")]
    missing = [option for option in given if f'"{option}"' not in source]
    return f"{file.relative_to(ROOT)} has no {missing}" if missing else None


@cache
def _blocks() -> list[str]:
    """The fenced blocks of all pages; one that begins with `# PATH` is the content of that file."""
    return [block.text for page in pages() for block in page.blocks]


def paths_problem(words: list[str]) -> str | None:
    paths = [word.split("::")[0] for word in words if "/" in word and not word.startswith("-")]
    missing = [path for path in paths if not (ROOT / path).exists()]
    return f"{missing} do not exist" if missing else None


def torchrun_problem(command: Command) -> str | None:
    words = list(command.words)
    if "-m" not in words:
        return None
    return python_problem(
        Command(command.place, ("python", *words[words.index("-m") :]), command.is_mention)
    )


def script_problem(command: Command) -> str | None:
    """`bash FILE`, `sbatch FILE`, or a script of launch/ by its path."""
    words = command.words if command.words[0].startswith("launch/") else command.words[1:]
    files = [word for word in words if word.endswith((".sh", ".sbatch"))]
    return paths_problem(files)


CHECKS: dict[str, Callable[[Command], str | None]] = {
    "mrl": mrl_problem,
    "make": make_problem,
    "python": python_problem,
    "python3": python_problem,
    "pytest": lambda command: paths_problem(list(command.words[1:])),
    "torchrun": torchrun_problem,
}


@pytest.mark.usefixtures("parser_message")
def test_every_command_of_the_pages_can_be_given_like_that() -> None:
    commands = [command for page in pages() for command in page.commands()]
    assert len(commands) > 50, "the pages are no longer read as they are written"
    checked = [(c, CHECKS.get(c.words[0], script_problem)(c)) for c in commands]
    problems = [f"{command}\n    {problem}" for command, problem in checked if problem]
    assert not problems, "\n".join(problems)


@pytest.mark.usefixtures("parser_message")
@pytest.mark.parametrize(
    "text",
    [
        "mrl view RUN --stepz 3",
        "mrl tain RECIPE",
        "mrl train RECIPE train.number=3",
        "mrl why RUN soon",
        "make demos",
        "make bench ARGS=1",
        "python -m benchmarks.nothing",
        "python -m benchmarks.weight_sync --never",
        "pytest tests/nothing.py",
        "torchrun --nproc-per-node 2 -m mrl tain RECIPE",
        "launch/nothing.sh RECIPE",
    ],
)
def test_a_command_that_is_wrong_is_found(text: str) -> None:
    words = tuple(text.split())
    assert CHECKS.get(words[0], script_problem)(Command("here", words, is_mention=False))
