"""This module breaks random lines of the core rooms and tells which breaks `make test` catches.

`python -m benchmarks.mutations` clones the checkout's commit, changes one expression or statement of it
at a time (`changes_of`), and runs tests until one fails: first those that name the module and those of
its room, then all that `make test` runs. It continues where it was interrupted, from
runs/mutations/results.jsonl; `--only NUMBER` repeats one break, for example after a test was added.
Writes runs/results/mutations.json. A break that nobody can notice, such as a longer timeout, also
counts as not caught: a reader of the list judges it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.evidence.result import finish, summary, write_result

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    *("algorithms", "collect", "data", "engine_pool", "engines", "exchange", "learn"),
    *("rewards", "run", "scheduling", "service", "weight_sync"),
)
"""The packages of mrl/ whose lines are broken, beside those of parallel/ and moe/."""
SUITE = ("-q", "-m", "not release")
WORKERS = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
NEAR_S, WHOLE_S = 900, 2400
"""Seconds after which tests that still run count as a failure: the break made them hang."""
SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Change(NamedTuple):
    """One break: the part `before` of a file's text, at an offset, becomes `after`."""

    line: int
    start: int
    before: str
    after: str


def changes_of(text: str) -> list[Change]:
    """Return all breaks of a module's text: another comparison, arithmetic or logical operator, an
    integer plus one, the other truth value, a condition without its `not`, a call left out."""
    starts = [0]
    for line in text.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    data, found = text.encode(), []
    for node in _nodes(ast.parse(text)):
        after = _changed(node)
        if after is None:
            continue
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        found.append(Change(node.lineno, start, data[start:end].decode(), after))
    return found


def _nodes(node: ast.AST) -> Iterator[Any]:
    """Yield the nodes that may be changed: no annotations, error messages, formatted strings,
    docstrings, or `zip(..., strict=True)`, which changes nothing where the lengths are equal."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_strict = isinstance(child, ast.keyword) and child.arg == "strict"
            if isinstance(child, ast.AST) and not (is_strict or isinstance(child, ast.JoinedStr)):
                yield child
                yield from _nodes(child)


def _changed(node: ast.AST) -> str | None:
    """Return the text of a node after its change; None for a node that has none."""
    if isinstance(node, ast.Compare) and (new := SWAPS.get(type(node.ops[0]))):
        return ast.unparse(ast.Compare(node.left, [new(), *node.ops[1:]], node.comparators))
    if isinstance(node, ast.BinOp) and (new := SWAPS.get(type(node.op))):
        if any(isinstance(side, ast.Constant | ast.JoinedStr) and not _is_number(side)
               for side in (node.left, node.right)):  # fmt: skip
            return None  # strings are joined
        return f"({ast.unparse(ast.BinOp(node.left, new(), node.right))})"
    if isinstance(node, ast.BoolOp):
        return f"({ast.unparse(ast.BoolOp(SWAPS[type(node.op)](), node.values))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return str(not node.value)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    return None


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def breakable(root: Path) -> dict[tuple[str, int], list[Change]]:
    """Return all breaks of the core rooms by file and line."""
    folders = [root / "parallel", root / "moe", *(root / "mrl" / room for room in ROOMS)]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    lines: dict[tuple[str, int], list[Change]] = {}
    for file in files:
        for change in changes_of(file.read_text()):
            lines.setdefault((str(file.relative_to(root)), change.line), []).append(change)
    return lines


def draw(
    lines: dict[tuple[str, int], list[Change]], seed: int, num: int
) -> list[tuple[str, Change]]:
    """Return `num` breaks of different lines; each line is as likely as another."""
    drawn = random.Random(seed)
    return [(name, drawn.choice(lines[name, line]))
            for name, line in drawn.sample(sorted(lines), num)]  # fmt: skip


def near_tests(root: Path, name: str) -> list[str]:
    """Return the test files that name a module, and those of its packages."""
    module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, last = module.rpartition(".")
    names = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{last}\b")
    if name.endswith("__init__.py"):  # else all that name a module of the package
        names = re.compile(rf"\b(?:from|import) {re.escape(module)}(?:\s|$)")
    packages = set(module.removeprefix("mrl.").split("."))
    found = [file for file in sorted((root / "tests").rglob("test_*.py"))
             if names.search(file.read_text()) or file.parent.name in packages]  # fmt: skip
    return [str(file.relative_to(root)) for file in found]


def run_tests(root: Path, arguments: list[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest until a test fails, and return its exit status (None: it hangs) and the first failed
    test."""
    num_files = sum(not argument.startswith("-") for argument in arguments)
    workers = () if "--last-failed" in arguments or 0 < num_files <= 5 else WORKERS
    command = [sys.executable, "-m", "pytest", "-x", *SUITE, *workers, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, "it hangs"
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else f"pytest ended with {done.returncode}"


def first_that_catches(root: Path, tests: list[str], limit_s: float) -> str:
    """Return the first test that fails and, when run alone, fails again; nothing where all pass.

    On a busy machine a test may fail once: then all run again. What fails three times, though not
    alone, counts as caught.
    """
    failed = ""
    for _ in range(3):
        code, failed = run_tests(root, ["--cache-clear", *tests], limit_s)
        if code in (0, 5):  # 5: no test was selected
            return ""
        if code not in (1, 2):  # 2: with several workers, -x interrupts the others
            break
        if run_tests(root, ["--last-failed", "--last-failed-no-failures=none"], limit_s)[0] != 0:
            break
    return failed


def attempt(root: Path, name: str, change: Change) -> dict[str, Any]:
    """Break the clone, run its tests, and mend it. Returns what caught the break."""
    file, start = root / name, time.monotonic()
    whole = file.read_bytes()
    end = change.start + len(change.before.encode())
    try:
        file.write_bytes(whole[: change.start] + change.after.encode() + whole[end:])
        near = near_tests(root, name)
        caught = (near and first_that_catches(root, near, NEAR_S)) or first_that_catches(
            root, [], WHOLE_S
        )
    finally:
        file.write_bytes(whole)
    seconds = round(time.monotonic() - start)
    return {"file": name, **change._asdict(), "caught_by": caught, "seconds": seconds}


def clone(folder: Path) -> Path:
    """Return a clone of the checkout's commit with its compiled extension.

    A clone that was there is mended: a process that was killed leaves its break in it.
    """
    root, partial = folder / "clone", folder / "clone.partial"
    if root.exists():
        subprocess.run(["git", "reset", "-q", "--hard"], cwd=root, check=True)
    else:
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(["git", "clone", "-q", str(ROOT), str(partial)], check=True)
        for extension in (ROOT / "mrl").glob("_C*.so"):
            shutil.copy(extension, partial / "mrl")
        partial.rename(root)
    return root


def known_rows(file: Path, wanted: list[tuple[str, Change]]) -> dict[int, dict[str, Any]]:
    """Return the rows on file by number, without those of other breaks: another seed or number of
    breaks draws others. A last line that was cut short is dropped, also from the file."""
    lines = file.read_text().split("\n") if file.exists() else [""]
    if lines[-1]:
        file.write_text("".join(line + "\n" for line in lines[:-1]))
    breaks = dict(enumerate((name, *change) for name, change in wanted))
    rows = [json.loads(line) for line in lines[:-1]]
    return {
        row["number"]: row
        for row in rows
        if (row["file"], *(row[key] for key in Change._fields)) == breaks.get(row["number"])
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--num", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="from 0")
    parser.add_argument("--list", action="store_true", help="print the breaks and end")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/mutations")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    root, lines = clone(arguments.folder), arguments.folder / "results.jsonl"
    wanted = draw(breakable(root), arguments.seed, arguments.num)
    if arguments.list:
        for number, (name, change) in enumerate(wanted):
            print(f"{number}: {name}:{change.line}: {change.before!r} -> {change.after!r}")
        return
    results = known_rows(lines, wanted)
    for number, (name, change) in enumerate(wanted):
        if number in (arguments.only or ()) or (not arguments.only and number not in results):
            row = {"number": number, **attempt(root, name, change)}
            results[number] = row
            with lines.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{number}: {name}:{change.line}: {row['caught_by'] or 'NOT CAUGHT'}", flush=True)
    rows = [results[number] for number in sorted(results)]
    caught = sum(bool(row["caught_by"]) for row in rows)
    content = {"seed": arguments.seed, "rows": rows}
    write_result("mutations", content, passed=caught, failed=len(rows) - caught)
    finish(caught, len(rows) - caught)


if __name__ == "__main__":
    main()
