"""This module runs a benchmark that measures one row for each of several named cases."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.evidence.result import finish, summary, write_result


def choose_cases(description: str | None, known: Iterable[str]) -> list[str]:
    """Return the cases that the command line names; all of them where it names none.

    An unknown name ends the program with code 2 and a line that lists the known ones.
    """
    names = list(known)
    parser = argparse.ArgumentParser(description=summary(description))
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(names))
    asked = parser.parse_args().cases
    if unknown := sorted(set(asked) - set(names)):
        parser.error(f"got {', '.join(unknown)}; expected some of {', '.join(names)}")
    return asked or names


def run_cases(
    result: str,
    description: str | None,
    known: Iterable[str],
    measure: Callable[[str, Path], dict[str, Any]],
    is_good: Callable[[Mapping[str, Any]], bool],
    *,
    packages: Sequence[str] = ("torch",),
    more: Mapping[str, Any] | None = None,
) -> NoReturn:
    """Measure each case that the command line names, print its row, and exit as a benchmark does.

    `measure` gets the name of the case and a scratch folder, which all cases share. Only a run of all
    cases is written to the results, with `more` before the rows.
    """
    known = list(known)
    names, rows = choose_cases(description, known), []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            rows.append(measure(name, Path(scratch)))
            print(json.dumps(rows[-1]), flush=True)
    failed = sum(not is_good(row) for row in rows)
    passed = len(rows) - failed
    if names == known:
        content = {**(more or {}), "rows": rows}
        write_result(result, content, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)
