"""This module kills ranks, engines, the launcher or everything, at any moment of a run: `make kills`.

The toy recipe trains on two ranks. Each kill (`kill -9`) strikes at a random moment of a step or of a
start. The run is started again. It must have the metrics, samples and weights of the run without a
fault, bit for bit, and have left no process, port, temporary file or shared memory. Kills are added to
FOLDER/kills.jsonl, and a call with the same `--folder` goes on with the number that is missing. Writes
runs/results/kills.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.evidence.catalog import target_of
from benchmarks.evidence.result import finish, provenance, summary, write_result
from benchmarks.fault_table.base import RECIPE, Toy
from benchmarks.fault_table.strikes import VICTIMS, left_of, outcome, strike
from mrl.config import load_recipe
from mrl.drill import Drill
from mrl.drill.job import Unexpected, num_rows
from mrl.run.folder import RunFolder
from mrl.toy_model import write_toy_model

NUM_KILLS = 100
"""Kills of a whole run; one with fewer is not written to the results."""
RANKS, NUM_STEPS = 2, 60
SHARE_AT_START = 0.25
"""Share of the kills that strike a start before its first step, where the one before ended the run."""


@dataclass
class Kill:
    """One kill and what came of it."""

    victim: str
    at: str
    """`start` or `step`."""
    after_s: float
    """Seconds from the start, or from the last look at the run, to the kill."""
    exit_code: int | None = None
    problems: list[str] = field(default_factory=list)
    commit: str = ""
    """The code that ran."""


class Killer:
    """Kills parts of one run, and starts it again."""

    def __init__(self, drill: Drill, chance: random.Random, start_s: float, step_s: float) -> None:
        """`start_s`, `step_s`: how long a start and a step take, about."""
        self.drill, self.chance, self.start_s, self.step_s = drill, chance, start_s, step_s
        self.is_down = False
        self.files: list[Path] = []

    def kill(self) -> Kill:
        """Kill once; return what came of it. Raises Unexpected."""
        drill, victim = self.drill, self.chance.choice(VICTIMS)
        if self.is_down and self.chance.random() < SHARE_AT_START:
            drill.job = job = drill.start()
            done = Kill(victim, "start", self.chance.uniform(0, self.start_s))
        else:
            problems = self.resume()
            job = drill.running()
            done = Kill(victim, "step", self.chance.uniform(0, 3 * self.step_s), problems=problems)
        time.sleep(done.after_s)
        if job.process.poll() is not None:
            raise Unexpected(f"ended before it was killed; see {job.log}")
        strike(victim, job)
        done.exit_code = outcome(drill, victim, job)
        self.is_down = done.exit_code is not None
        if self.is_down:
            problems, files = left_of(victim, job)
            done.problems += problems
            self.files += files
        return done

    def resume(self) -> list[str]:
        """Start the run again where it is down; return what is not as without a fault."""
        if not self.is_down:
            return []
        problems = self.drill.continued(num_rows(self.drill.run))
        problems += [f"the next start left {file}" for file in self.files if file.exists()]
        self.is_down, self.files = False, []
        return problems


def killed(toy: Toy, folder: Path, kills: int, seed: int) -> list[Kill]:
    """Kill until FOLDER/kills.jsonl has so many; return all of them."""
    file = folder / "kills.jsonl"
    found = (
        [Kill(**json.loads(line)) for line in file.read_text().splitlines()]
        if file.exists()
        else []
    )
    recipe = load_recipe(RECIPE, toy.overrides("parallel.expert_model_parallel_size=2"))
    number = len(list(folder.glob("part_*")))
    commit = provenance(target_of("kills").measures)["commit"]
    while len(found) < kills:
        drill = Drill(recipe, RANKS, folder / f"part_{number}", NUM_STEPS)
        number += 1
        try:
            began = time.monotonic()
            drill.train_without_fault()
            steps = [row["time/step_s"] for row in RunFolder(drill.reference).read_metrics()]
            start_s = max(5.0, time.monotonic() - began - sum(steps))
            step_s = sorted(steps)[len(steps) // 2]
            killer = Killer(drill, random.Random(seed + len(found)), start_s, step_s)
            while len(found) < kills:
                found.append(one := killer.kill())
                one.commit = commit
                print(f"{len(found)}: {asdict(one)}", flush=True)
                with file.open("a") as out:
                    out.write(json.dumps(asdict(one)) + "\n")
            if problems := killer.resume():
                found[-1].problems += problems
        except Unexpected as error:
            found.append(Kill("?", "?", 0.0, problems=[str(error)]))
            print(f"{len(found)}: {error}", flush=True)
        finally:
            drill.end()
    return found


def main() -> None:
    """Kill, print and write what came of it, and exit with 1 where a kill did any harm."""
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--kills", type=int, default=NUM_KILLS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"), help="is continued")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.folder.mkdir(parents=True, exist_ok=True)
    toy = Toy(options.folder.absolute(), options.folder.absolute() / "model")
    if not toy.model.exists():
        write_toy_model(toy.model)
    found = killed(toy, options.folder.absolute(), options.kills, options.seed)
    counts = Counter(f"{each.victim} in a {each.at}" for each in found)
    failures = [problem for each in found for problem in each.problems]
    for failure in failures:
        print(failure)
    print(", ".join(f"{number} x {what}" for what, number in sorted(counts.items())))
    failed = sum(bool(each.problems) for each in found)
    if len(found) >= NUM_KILLS:
        commits = Counter(each.commit for each in found)
        content = {"kills": dict(counts), "commits": dict(commits), "failures": failures}
        packages = ("torch", "sglang", "megatron-core")
        write_result("kills", content, passed=len(found) - failed, failed=failed, packages=packages)
    finish(len(found) - failed, failed)


if __name__ == "__main__":
    main()
