"""Counts what the house rules bound: `python -m tests.house.style`.

tests/house/test_style.py holds the counts at zero violations. The rules:

- Files: at most 8 in the root of mrl/; no Python file over 350 lines; no function over 60 lines.
- Docstrings of public modules, classes, functions and methods have a verb in their first sentence. A
  sentence has one if it contains an auxiliary ("is", "has", "can", ...) or the third person of a
  verb of verbs.txt ("returns"), or such a verb after a plural or a relative pronoun ("the ops hold"),
  or if its first word is one ("Return"). Third persons that are also plurals of our nouns ("groups",
  "samples", "runs") count in the first place only. Properties and fields may be named by a noun phrase.
- No docstring opens with a preposition ("Of two sides that ...") or with "where", whether it is public
  or not. This rule holds for benchmarks, launch and tests too.
- Names: see `FORBIDDEN` and `broken_names`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("mrl", "moe", "parallel")
BESIDE = ("benchmarks", "launch", "tests")
MAX_ROOT_FILES, MAX_FILE_LINES, MAX_FUNCTION_LINES = 8, 350, 60

_PREPOSITIONS = (
    "of on with by as for from to at under over into against beside within without than per in "
    "between through among where"
)
PREPOSITIONS = frozenset(_PREPOSITIONS.split())
_AUXILIARIES = (
    "is are was were be has have had does do did can cannot could may might must will would shall "
    "should isn't aren't doesn't don't can't needn't"
)
AUXILIARIES = frozenset(_AUXILIARIES.split())
BASE_VERBS = frozenset(
    word
    for line in (Path(__file__).parent / "verbs.txt").read_text().splitlines()
    if not line.startswith("#")
    for word in line.split()
)
_NOUNS = (
    "answers batches bounds calls checks counts ends exports files forms groups hooks imports indexes "
    "labels lists loads logs maps marks masks models names needs notes numbers orders parts passes "
    "places plans points prints processes ranks records reports requests results routes rules runs "
    "samples scores sets shapes shares slices spans starts states steps stops tests times turns "
    "updates uses values views waits weights"
)
NOUNS = frozenset(_NOUNS.split())
FORBIDDEN = {
    "parcel": "transfer",
    "warm_start": "sft",
    "warmstart": "sft",
    "zero_signal": "zero_variance",
    "abstain": "masked, or without a reward",
    "unfinished": "partial (a partial rollout)",
    "recordedroutes": "Replay",
}
"""Parts of identifiers that the glossary replaced, and what it says instead."""


def third_person(verb: str) -> str:
    if re.search(r"(s|x|z|ch|sh|o)$", verb):
        return f"{verb}es"
    return f"{verb[:-1]}ies" if re.search(r"[^aeiou]y$", verb) else f"{verb}s"


THIRD_PERSONS = frozenset(map(third_person, BASE_VERBS))


def sources(folders: tuple[str, ...] = PACKAGES) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", re.sub(r"`[^`]*`", " ", text).lower())


def has_verb(docstring: str) -> bool:
    found = words(first_sentence(docstring))
    if found and (found[0] in BASE_VERBS or found[0] in THIRD_PERSONS):
        return True
    plural = [
        False,
        *(word.endswith("s") or word in ("they", "that", "which", "who") for word in found),
    ]
    return any(
        word in AUXILIARIES
        or (word in THIRD_PERSONS and word not in NOUNS)
        or (after_plural and word in BASE_VERBS)
        for word, after_plural in zip(found, plural, strict=False)
    )


def opens_with_preposition(docstring: str) -> bool:
    found = re.match(r"\W*([A-Za-z]+)", docstring)
    return found is not None and found[1].lower() in PREPOSITIONS


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str, bool]]:
    """(name, line, text, whether a sentence is due) of all docstrings, those of fields included."""
    yield from _docstrings(tree, "module", True)


def _docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    public: bool,
) -> Iterator[tuple[str, int, str, bool]]:
    text = ast.get_docstring(node)
    if text:
        is_property = not isinstance(node, ast.Module) and any(
            "property" in ast.unparse(decorator) for decorator in node.decorator_list
        )
        yield name, node.body[0].lineno, text, public and not is_property
    for before, statement in zip(node.body, node.body[1:], strict=False):
        value = statement.value if isinstance(statement, ast.Expr) else None
        is_field = isinstance(before, ast.Assign | ast.AnnAssign)
        if is_field and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield f"{name}: field", statement.lineno, value.value, False
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _docstrings(
                inner, inner.name, public and not inner.name.startswith("_") and not inside
            )


def broken_docstrings(path: Path) -> Iterator[str]:
    module = path.relative_to(ROOT)
    for name, line, text, due in docstrings(ast.parse(path.read_text())):
        where = f"{module}:{line}: {name}: {first_sentence(text)[:70]!r}"
        if opens_with_preposition(text):
            yield f"{where} opens with a preposition"
        elif due and module.parts[0] in PACKAGES and not has_verb(text):
            yield f"{where} has no verb"


def long_functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {length} lines"


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a file gives: of functions, classes, arguments, fields and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno


def broken_names(path: Path) -> Iterator[str]:
    tree, module = ast.parse(path.read_text()), str(path.relative_to(ROOT))
    for name, line in identifiers(tree):
        for word, instead in FORBIDDEN.items():
            if word in name.lower():
                yield f"{module}:{line}: {name}: say {instead}"
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None)
        if annotation is not None and re.fullmatch(
            r"(Mesh|mesh\.Mesh)( \| None)?", ast.unparse(annotation)
        ):
            target = getattr(node, "arg", None) or ast.unparse(getattr(node, "target", node))
            if not target.endswith("mesh"):
                yield f"{module}:{node.lineno}: {target}: process groups are a mesh"
        if isinstance(node, ast.ClassDef) and node.name.endswith("Plan") and node.name != "Plan":
            yield f"{module}:{node.lineno}: {node.name}: a plan is what preflight found"
        scores = isinstance(node, ast.FunctionDef) and re.search(
            r"(^|_)(score|scoring|evaluate)(_|$)", node.name
        )
        if scores and module.startswith(("parallel/", "mrl/learn/")):
            yield f"{module}:{node.lineno}: {node.name}: log-probs are not scores"


def too_long_files() -> Iterator[str]:
    for path in sources((*PACKAGES, *BESIDE)):
        length = len(path.read_text().splitlines())
        if length > MAX_FILE_LINES:
            yield f"{path.relative_to(ROOT)} has {length} lines"


def violations() -> dict[str, list[str]]:
    """Return what breaks each rule, with file and line."""
    files = sources()
    documented = [*files, *sources(BESIDE)]
    root_files = sorted(path.name for path in (ROOT / "mrl").glob("*.py"))
    return {
        "files in the root of mrl/": root_files if len(root_files) > MAX_ROOT_FILES else [],
        f"files over {MAX_FILE_LINES} lines": list(too_long_files()),
        f"functions over {MAX_FUNCTION_LINES} lines": [x for p in files for x in long_functions(p)],
        "docstrings": [x for p in documented for x in broken_docstrings(p)],
        "names": [x for p in files for x in broken_names(p)],
    }


def main() -> None:
    for rule, broken in violations().items():
        print("\n".join(broken))
        print(f"{rule}: {len(broken)}")


if __name__ == "__main__":
    main()
