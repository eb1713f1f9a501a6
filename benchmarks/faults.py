"""This module provokes every fault of the table, and prints what came of each: `make faults`.

The rows of `mrl drill` are tried on the toy recipe: with its engine where the fault is about it, and
with the rollouts of that run where it is not. To these come bad inputs, kills of the engine at random
moments of the rollout, and the faults that only a test can provoke. Writes runs/results/faults.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.evidence.result import between_markers, finish, summary, write_result
from benchmarks.fault_table import engine, files, inputs, tested
from benchmarks.fault_table.base import KINDS, RECIPE, ROOT, Toy
from mrl.config import load_recipe
from mrl.drill import HEADER, Row, drill, table_rows
from mrl.run import console
from mrl.toy_model import write_toy_model

PAGE = ROOT / "docs" / "faults.md"
MARKER = "table of faults"
RANKS = 2
NUM_STEPS = 24
NUM_KILLS = 6
WITH_ENGINE = {
    "kill-rank-start": 1, "kill-rank-rollout": 1, "kill-launcher": 18, "kill-tree": 18,
    "kill-engine": 9, "stop-engine": 9, "second-start": 16, "stop-rank-rollout": 2,
    "reward-raises": 8, "reward-hangs": 8,
}  # fmt: skip
"""Rows of `mrl drill` that need an engine, with the number of their fault."""
SAVED = {
    "none": 11, "kill-rank-train": 1, "kill-rank-save": 4, "sigusr1": 3, "sigterm": 3, "sighup": 3,
    "damaged-checkpoint": 6, "cut-metrics": 6, "damaged-metrics": 6, "other-recipe": 16, "typo": 15,
    "stop-rank-train": 2, "stop-rank-save": 2,
}  # fmt: skip
"""Rows of `mrl drill` on saved rollouts, with the number of their fault."""
TOPICS = ("inputs", "tested", "drill", "engine")


def rows(topics: list[str], toy: Toy, kills: int, seed: int) -> Iterator[tuple[int, Row]]:
    """Yield (number of the fault, row) for all faults of some topics."""
    with ThreadPoolExecutor(1) as pool:
        # These wait most of the time, for limits of a minute: they run beside the others.
        later = pool.submit(lambda: list(tested.rows() if "tested" in topics else ()))
        if "inputs" in topics:
            yield from inputs.rows(toy)
            yield from files.machines(toy)
        if "drill" in topics:
            yield from drilled(toy)
        yield from later.result()
    if "engine" in topics:
        yield from engine.rows(kills, seed)


def drilled(toy: Toy) -> Iterator[tuple[int, Row]]:
    """Yield (number of the fault, row) for the faults of `mrl drill`, on two ranks."""
    from mrl.drill import FAULTS

    layout = "parallel.expert_model_parallel_size=2"
    live = load_recipe(RECIPE, toy.overrides(layout, "debug.save_rollouts=true", output="live"))
    names = [name for name in FAULTS if name in WITH_ENGINE]
    for row in drill(live, RANKS, toy.folder / "live", names, NUM_STEPS):
        yield WITH_ENGINE.get(row.fault, 11), row
    yield from files.changed(toy.folder / "live/reference", toy, RANKS)
    rollouts = f"debug.load_rollouts={toy.folder / 'live/reference/rollouts'}"
    saved = load_recipe(RECIPE, toy.overrides(layout, rollouts, output="saved"))
    names = [name for name in FAULTS if name in SAVED]
    for row in drill(saved, RANKS, toy.folder / "saved", names, NUM_STEPS):
        yield SAVED[row.fault], row


def markdown(found: list[tuple[int, Row]]) -> str:
    """Return the table of docs/faults.md."""
    lines = [
        "| | fault | what was done | what happened | seconds | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for number, row in sorted(found, key=lambda pair: pair[0]):
        cells = (str(number), f"`{row.fault}`", row.did, row.happened)
        verdict = row.verdict if row.passed else "**failed**"
        lines.append(f"| {' | '.join(_cell(c) for c in cells)} | {row.seconds:.1f} | {verdict} |")
    return "\n".join(lines)


def without_paths(row: Row) -> Row:
    """Return the row without the folders of this machine: files keep their names."""
    roots = "|".join(re.escape(each) for each in (tempfile.gettempdir(), str(ROOT)))
    folders = re.compile(rf"({roots})(/[^\s/:;,]+)*/")
    texts = [folders.sub("", text) for text in (row.did, row.happened, *row.problems)]
    return dataclasses.replace(row, did=texts[0], happened=texts[1], problems=tuple(texts[2:]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the table of faults.json."""
    names = [field.name for field in dataclasses.fields(Row)]
    found = [(row["kind"], Row(**{name: row[name] for name in names})) for row in result["rows"]]
    return {PAGE: between_markers(PAGE.read_text(), MARKER, markdown(found))}


def main() -> None:
    """Provoke the faults, print the table, and exit with 1 where one ended otherwise."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--topics", default=",".join(TOPICS), help=f"some of {','.join(TOPICS)}")
    parser.add_argument("--kills", type=int, default=NUM_KILLS, help="kills of the engine")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    topics = options.topics.split(",")
    if unknown := set(topics) - set(TOPICS):
        parser.error(f"--topics: got {sorted(unknown)}, expected some of {', '.join(TOPICS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="mrl-faults-") as folder:
        toy = Toy(Path(folder), Path(folder) / "model")
        write_toy_model(toy.model)
        for number, each in rows(topics, toy, options.kills, options.seed):
            row = without_paths(each)
            found.append((number, row))
            state = row.verdict if row.passed else f"FAILED: {'; '.join(row.problems)}"
            print(f"{number:2} {row.fault}: {state} ({row.seconds:.1f} s)", flush=True)
    console.table("Faults", HEADER, table_rows([row for _, row in found]))
    minutes = (time.monotonic() - began) / 60
    missing = [f"{n} {what}" for n, what in KINDS.items() if n not in {n for n, _ in found}]
    print(f"{minutes:.1f} minutes; kinds without a row: {', '.join(missing) or 'none'}")
    passed = sum(row.passed and row.verdict != "not provoked" for _, row in found)
    failed = sum(not row.passed for _, row in found)
    if set(topics) == set(TOPICS) and options.kills == NUM_KILLS:  # only a whole run is written
        content = {
            "minutes": round(minutes, 1),
            "missing": missing,
            "rows": [{"kind": number, **dataclasses.asdict(row)} for number, row in found],
        }
        packages = ("torch", "sglang", "megatron-core")
        write_result("faults", content, passed=passed, failed=failed, packages=packages)
    finish(passed, failed)


if __name__ == "__main__":
    main()
