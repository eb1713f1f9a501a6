"""Files, tests, modules, links and recipe keys that the pages name are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from tests.docs.metric_keys import documented
from tests.docs.pages import ROOT, Page, pages
from tests.docs.recipe_keys import SECTIONS, is_key

ROOMS = "mrl|moe|parallel|csrc|launch|tests|benchmarks|studies|requirements|docs"
PATH = re.compile(rf"(?<![\w/.-])((?:{ROOMS})/[\w./*-]*)")
TEST = re.compile(r"`([\w/]+\.py)?::(\w+)(?:\[([^`]*)\])?`")
BARE_TEST = re.compile(r"(?<![`\w/.])([\w/]+\.py)?::(test_\w+)(?:\[([^`\s]*)\])?")
DOTTED = re.compile(r"(?:mrl|moe|parallel|benchmarks|studies)(?:\.\w+)+")
LINK = re.compile(r"\]\(([^)\s]+)\)")
METRIC = re.compile(r"[a-z_]+(?:/[\w@<>*]+)+")
NOT_KEPT = ("mrl/_C*.so", "mrl._C", "benchmarks/results/gpu_check.json")
"""What is built, or written on a GPU only, and not in a checkout."""


def missing_paths(page: Page) -> Iterator[str]:
    for match in PATH.finditer(page.text):
        path = match[1].rstrip(".")
        if path.startswith("moe/") and not path.endswith((".py", "/")):
            continue  # a metric
        pattern = re.sub(r"\b[A-Z]{2,}\b", "*", path)  # benchmarks/results/NAME.json
        if path not in NOT_KEPT and not any(ROOT.glob(pattern.rstrip("/"))):
            yield f"{page.name}:{_line(page, match)}: {path} does not exist"


def missing_tests(page: Page) -> Iterator[str]:
    file = ""
    both = [*TEST.finditer(page.text), *BARE_TEST.finditer(page.text)]
    for match in sorted(both, key=lambda match: match.start()):
        file, name, case = match[1] or file, match[2], match[3] or ""
        at = next(iter([ROOT / file] if "/" in file else (ROOT / "tests").rglob(file)), None)
        source = at.read_text() if at is not None and at.is_file() else ""
        if f"def {name}(" not in source or (not case.endswith("...") and case not in source):
            yield f"{page.name}:{_line(page, match)}: no {file}::{name} {case}".rstrip()


def missing_modules(page: Page) -> Iterator[str]:
    for text, line in page.inline():
        known = text in NOT_KEPT or is_key(text)  # `moe` is a room and a branch of the recipe
        if DOTTED.fullmatch(text) and not known and not _is_name(text):
            yield f"{page.name}:{line}: no module or name {text}"


def _is_name(dotted: str) -> bool:
    """Whether it is a module, or a name that stands in the source of one."""
    if (ROOT / f"{dotted}.py").is_file() or (ROOT / dotted).exists():  # a file in the root
        return True
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        file = (
            base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        )
        if file.is_file():
            source = file.read_text()
            return all(re.search(rf"\b{name}\b", source) for name in parts[end:])
    return False


def missing_keys(page: Page) -> Iterator[str]:
    if (
        page.path.name == "coming_from.md"
    ):  # test_coming_from.py holds it: its left column is not ours
        return
    for text, line in page.inline():
        match = re.match(r"([a-z_]+)(\.[a-z_*.]+)(?:$|[=:])", text)
        if (
            match
            and match[1] in SECTIONS
            and not is_key(match[1] + match[2])
            and not _is_name(text)
            and not (ROOT / "benchmarks/results" / text).exists()
        ):
            yield f"{page.name}:{line}: the recipe has no key {match[1]}{match[2]}"


def missing_metrics(page: Page) -> Iterator[str]:
    """`mismatch/k3`, `memory/train/*` or `mask/NAME` that docs/metrics.md does not have."""
    keys = [re.sub(r"<\w+>", "some", key) for key in documented()]
    namespaces = {key.split("/")[0] for key in keys if "/" in key}
    for text, line in page.inline():
        if METRIC.fullmatch(text) and text.split("/")[0] in namespaces:
            form = re.sub(r"<\w+>|\*|NN|[A-Z]{2,}", "*", text)
            pattern = re.compile(".+".join(map(re.escape, form.split("*"))))
            if not any(map(pattern.fullmatch, keys)) and not (ROOT / text).exists():
                yield f"{page.name}:{line}: docs/metrics.md has no {text}"


def dead_links(page: Page) -> Iterator[str]:
    for match in LINK.finditer(page.text):
        target, _, anchor = match[1].partition("#")
        if target.startswith(("http:", "https:")):
            continue
        path = (page.path.parent / target).resolve() if target else page.path
        where = f"{page.name}:{_line(page, match)}"
        if not path.exists():
            yield f"{where}: the link {match[1]} leads nowhere"
        elif anchor and anchor not in _anchors(Page(path)):
            yield f"{where}: {path.name} has no heading #{anchor}"


@cache
def _anchors(page: Page) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _line(page: Page, match: re.Match[str]) -> int:
    return page.text[: match.start()].count("\n") + 1


CHECKS = (
    missing_paths,
    missing_tests,
    missing_modules,
    missing_keys,
    missing_metrics,
    dead_links,
)


def test_what_the_pages_name_is_there() -> None:
    problems = [problem for page in pages() for find in CHECKS for problem in find(page)]
    assert not problems, "\n".join(problems)


def test_every_page_of_docs_says_first_what_its_reader_can_do() -> None:
    for page in pages():
        if page.path.parent.name == "docs":
            title, first, *_ = page.text.split("\n\n")
            assert title.startswith("# "), page.name
            assert re.match(r"(After|With)\b[^.]*\byou can ", first), f"{page.name}: {first}"


def test_a_name_that_is_not_there_is_found() -> None:
    page = Page(ROOT / "docs/metrics.md")
    page.__dict__["text"] = (
        "`mrl/nothing.py` `tests/docs/pages.py::test_nothing` `mrl.nothing.name` `train.nothing`\n"
        "`mismatch/nothing` `mismatch/*` `mask/NAME` tests/docs/pages.py::test_none and ::test_more\n"
        "[a](nothing.md) [b](metrics.md#nothing)\n"
    )
    assert len(list(missing_paths(page))) == 1
    assert len(list(missing_tests(page))) == 3
    assert len(list(missing_modules(page))) == 1
    assert len(list(missing_keys(page))) == 1
    assert len(list(missing_metrics(page))) == 1
    assert len(list(dead_links(page))) == 2
