"""Stops and kills every process of a job in every phase, and tells what came of it.

The jobs of `make process-table` are runs of the toy recipe and a service, in each placement. Their
processes are found in the process tree of a job without a fault. Each gets SIGSTOP and SIGKILL in each
phase in which it is there, under limits of the product that are small enough to be waited for. A row
passes where the job goes on (with the same bits, where that is promised), replaces the process, or ends
with a report and leaves nothing behind; it fails where anything waits without a limit. Rows are added
to a file of FOLDER, and a call goes on with what is neither there nor in the committed result. Rows of
other code do not count (`benchmarks.evidence.digest`). Writes runs/results/process_table.json.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.evidence.catalog import target_of
from benchmarks.evidence.result import RESULTS, finish, provenance, summary, write_result
from benchmarks.process_strikes import page
from benchmarks.process_strikes.lane import Lane, is_brief, observed, trials_of
from benchmarks.process_strikes.placements import SUBJECTS
from benchmarks.process_strikes.strike import Row, Trial
from mrl.drill.job import Unexpected
from mrl.toy_model import write_toy_model

RESULT = "process_table"


class Records:
    """What is on file of earlier calls, and committed: rows, and the processes of each placement.

    Only what was made with the measured code as it is now counts.
    """

    def __init__(self, folder: Path, committed: Path = RESULTS / f"{RESULT}.json") -> None:
        self.folder = folder
        code = provenance(target_of(RESULT).measures)
        self.commit, digest = code["commit"], code["digest"]
        self.rows_file, self.seen_file = (
            folder / f"{name}_{digest}.jsonl" for name in ("rows", "seen")
        )
        result = json.loads(committed.read_text()) if committed.exists() else {}
        self._committed = result if result.get("digest") == digest else {}

    def rows(self) -> dict[Trial, Row]:
        """Return the newest row of each trial; of those of no earlier call, the committed one."""
        kept = [each for each in self._committed.get("rows", ()) if "happened" in each]
        rows = [Row(**each) for each in (*kept, *_lines(self.rows_file))]
        return {row.trial: row for row in rows}

    def seen(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return, by placement, how many seconds each process was there in each phase."""
        here = {each["placement"]: each["seconds"] for each in _lines(self.seen_file)}
        return {**self._committed.get("seen", {}), **here}

    def add(self, row: Row) -> None:
        """Add a row, or a newer version of one."""
        row.commit = self.commit
        row.cause = row.cause.replace(f"{self.folder}/", "")
        row.then = row.then.replace(f"{self.folder}/", "")
        row.problems = [text.replace(f"{self.folder}/", "") for text in row.problems]
        _add_line(self.rows_file, asdict(row))
        end = f"code {row.exit_code}: {row.cause}" if row.happened == "ended" else row.then
        state = "FAILED: " + "; ".join(row.problems) if row.problems else row.happened
        print(f"{row.trial}: {state} ({row.seconds:.1f} s) {end}", flush=True)

    def add_seen(self, placement: str, seconds: dict[str, dict[str, float]]) -> None:
        """Add what was seen of a placement."""
        _add_line(self.seen_file, {"placement": placement, "seconds": seconds})


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _add_line(file: Path, content: dict) -> None:
    with file.open("a") as out:
        out.write(json.dumps(content) + "\n")


def strike_all(
    placement: str, folder: Path, only: Sequence[str], without: Sequence[str], records: Records
) -> None:
    """Do the trials of a placement that are not on file."""
    seen = records.seen().get(placement)
    done = records.rows()

    def missing(found: dict[str, dict[str, float]]) -> list[Trial]:
        trials = trials_of(placement, found)
        chosen = [t for t in trials if matches(t, only) and not set(t) & set(without)]
        return [t for t in chosen if t not in done]

    if seen is not None and not missing(seen):
        return
    subject = SUBJECTS[placement](folder / placement.replace(" ", "_").replace(",", ""),
                                  folder / "model")  # fmt: skip
    try:
        subject.prepare()
        if seen is None:
            seen = observed(subject)
            records.add_seen(placement, seen)
        Lane(subject, records.add).run(missing(seen))
    except Unexpected as error:
        print(f"{placement}: {error}", flush=True)
    finally:
        subject.end()


def matches(trial: Trial, only: Sequence[str]) -> bool:
    """Whether every word of `only` is in the placement, or is the role, the phase or the signal."""
    return all(
        word in trial.placement or word in (trial.role, trial.phase, trial.signal) for word in only
    )


def main() -> None:
    """Strike, print and write what came of it, and exit with 1 where a row failed."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD",
        help="words that must all fit: of a placement, a process, a phase or a signal, such as "
        "'colocated' 'detokenizer' 'rollout' 'SIGSTOP'",
    )  # fmt: skip
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="WORD",
        help="processes, phases and signals that are left out in this call",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=3, help="placements that are tried at once")
    parser.add_argument("--folder", type=Path, default=Path("runs/process_table"))
    parser.add_argument("--write-page", action="store_true", help="write what is on file, and end")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        write_toy_model(folder / "model")
    records = Records(folder)
    names = [
        name for name in SUBJECTS
        if any(word in name for word in options.only) or not any(
            word in each for word in options.only for each in SUBJECTS)
    ]  # fmt: skip
    if not options.write_page:
        with ThreadPoolExecutor(options.jobs) as pool:
            work = partial(strike_all, only=options.only, without=options.without, records=records)
            list(pool.map(lambda name: work(name, folder), names))
    content, passed, failed = results_of(records)
    if not (options.only or options.without):
        write(content, passed, failed)
    missing = sum("happened" not in row for row in content["rows"])
    unseen = len(content["not_measured"]) - missing
    print(f"not measured: {missing} rows of {len(content['rows'])}, and {unseen} placements")
    finish(passed, failed)


def results_of(records: Records) -> tuple[dict[str, Any], int, int]:
    """Return the content of the result, and how many rows passed and failed."""
    rows = records.rows()
    passed = sum(row.passed for row in rows.values() if row.happened != "was not there")
    return content_of(rows, records.seen()), passed, sum(not row.passed for row in rows.values())


def write(content: dict[str, Any], passed: int, failed: int) -> None:
    """Write the result."""
    packages = ("torch", "sglang", "megatron-core")
    write_result(RESULT, content, passed=passed, failed=failed, packages=packages)


def pages(name: str, result: dict[str, Any]) -> dict[Path, str]:
    """Return the page with the table of process_table.json."""
    return {page.PAGE: page.with_table(result)}


def content_of(
    rows: dict[Trial, Row], seen: dict[str, dict[str, dict[str, float]]]
) -> dict[str, Any]:
    """Return the rows of the table, those that are not measured among them, and what is too brief."""
    found, brief = [], []
    for placement in SUBJECTS:
        for role, seconds in seen.get(placement, {}).items():
            if is_brief(role, seconds):
                brief.append({"placement": placement, "role": role,
                              "seconds": round(sum(seconds.values()), 2)})  # fmt: skip
        found += trials_of(placement, seen.get(placement, {}))
    missing = [trial for trial in found if trial not in rows]
    missing_placements = [name for name in SUBJECTS if name not in seen]
    return {
        "rows": [asdict(rows[t]) if t in rows else t._asdict() for t in found],
        "not_measured": [str(trial) for trial in missing] + missing_placements,
        "too_brief": brief,
        "seen": seen,
    }


if __name__ == "__main__":
    main()
