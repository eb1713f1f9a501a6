"""This module runs the commands of docs/first_hour.md as a reader would, section by section.

    python -m benchmarks.first_hour [SECTION ...]

A block of the page whose first line is a comment with a path is written to that file. The `bash` blocks
of a section are run in one shell, from the root of the checkout; a section has passed where each of its
commands has. What they print is kept in runs/first_hour/SECTION.log. Files of an earlier run are
removed, except runs/smollm, which takes long to make. Only a run of the whole page is written to the
results.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.evidence.digest import ROOT
from benchmarks.evidence.result import between_markers, finish, summary, write_result

PAGE = ROOT / "docs" / "first_hour.md"
FOLDER = ROOT / "runs" / "first_hour"
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w./]+\.\w+)\n")
LIMIT_S = 1800
"""After so many seconds a section counts as failed."""
IN_SHELL = "source .venv/bin/activate 2> /dev/null || true\n"
"""The state of the reader's shell after the first section."""


class Section(NamedTuple):
    """A section of the page that has commands."""

    title: str
    files: Mapping[str, str]
    """The text of each file, by its path."""
    script: str
    """The text of all `bash` blocks."""


def sections(page: str) -> Iterator[Section]:
    """Yield the sections of the page's text that have commands, in order."""
    titles = list(HEADING.finditer(page))
    for i, title in enumerate(titles):
        end = titles[i + 1].start() if i + 1 < len(titles) else len(page)
        files, commands = {}, []
        for language, text in BLOCK.findall(page[title.end() : end]):
            if language == "bash":
                commands.append(text)
            elif path := FILE.match(text):
                files[path[1]] = text
        if commands:
            yield Section(title[1], files, "".join(commands))


def run(section: Section) -> dict[str, Any]:
    """Write the files of a section, run its commands, and return its row."""
    for path, text in section.files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    print(f"\n== {section.title}", flush=True)
    environment = {name: v for name, v in os.environ.items() if name != "OMP_NUM_THREADS"}
    FOLDER.mkdir(parents=True, exist_ok=True)
    log = FOLDER / f"{section.title.lower().replace(' ', '_')}.log"
    begun = time.monotonic()
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-exo", "pipefail", "-c", IN_SHELL + section.script],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            code = shell.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            _end_group(shell)
    seconds = time.monotonic() - begun
    print(log.read_text(errors="replace"), flush=True)
    return {"section": section.title, "seconds": round(seconds, 1), "code": code}


def _end_group(shell: subprocess.Popen[bytes]) -> None:
    """End what a section has left, such as a service in the background."""
    try:
        os.killpg(shell.pid, 15)
    except ProcessLookupError:
        return
    shell.wait()


def table(rows: list[Mapping[str, Any]]) -> str:
    """Return the rows as a table of Markdown."""
    lines = [f"| {row['section']} | {row['seconds']:.0f} |" for row in rows]
    total = sum(row["seconds"] for row in rows) / 60
    lines = ["| section | seconds |", "|---|---|", *lines, f"| all | {total:.0f} minutes |"]
    return "\n".join(lines)


def pages(name: str, result: Mapping[str, Any]) -> dict[Path, str]:
    """Return the page with the seconds of the result's run."""
    text = f"\n{table(result['rows'])}\n\nOn {result['machine']}, {result['date']}.\n"
    return {PAGE: between_markers(PAGE.read_text(), name, text)}


def main() -> None:
    """Run the page, print one line for each section and write runs/results/first_hour.json."""
    known = list(sections(PAGE.read_text()))
    titles = [section.title for section in known]
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(titles))
    asked = parser.parse_args().sections
    if unknown := sorted(set(asked) - set(titles)):
        parser.error(f"got {', '.join(unknown)}; expected some of {', '.join(titles)}")
    if not asked:
        shutil.rmtree(FOLDER, ignore_errors=True)
    rows = [run(section) for section in known if not asked or section.title in asked]
    for row in rows:
        print(f"{row['section']}: {row['seconds']:.0f} s, code {row['code']}")
    failed = sum(row["code"] != 0 for row in rows)
    passed = len(rows) - failed
    if not asked:
        packages = ("torch", "sglang", "megatron-core", "transformers")
        write_result("first_hour", {"rows": rows}, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)


if __name__ == "__main__":
    main()
