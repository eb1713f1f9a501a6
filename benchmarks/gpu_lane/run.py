"""Everything that only a GPU can show, the most telling first: `make gpu-check`, or
`python -m benchmarks.gpu_lane.run [PART ...]`.

Each part is a process with a time limit of its own, so that one that fails or hangs hides no other,
and what it found is on file before the next one starts (`state.py`). The whole ends by itself at
`--total-s`; a further call goes on: it reads benchmarks/results/gpu_check.json (or `--resume FILE`),
leaves out what has passed with the same code and versions, and begins with what no call has reached.

`--device cpu` runs, on the toy model, every part that makes sense without a GPU, to see that the code
runs; its figures mean nothing, and they go to benchmarks/results only where `--out` says so.
`--dry-run` goes through the parts as on a GPU, where there is none, each up to its first CUDA call
(dry_run.py).

Files, in `--out` (by default $OUT where that is set) and, on GPUs, in benchmarks/results:
gpu_check.json, gpu_check.jsonl (an event a line), gpu_check.log (the ends of all logs). On GPUs also
gpu_caches.tar.gz in `--out`, what was compiled at run time: a call that finds it in .gpu-lane/ (or gets
it as `--caches FILE`) unpacks it first.
The last line is `N passed, N failed, N skipped`; skipped are those that were not reached, not asked
for, or need a GPU. Exits with 1 where a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.gpu_lane import dry_run
from benchmarks.gpu_lane.caches import ARCHIVE, Caches
from benchmarks.gpu_lane.catalog import BY_NAME, Part
from benchmarks.gpu_lane.children import adopt_orphans, end_children, run_limited
from benchmarks.gpu_lane.dry_run import DryRun
from benchmarks.gpu_lane.state import CUT, FAILED, PASSED, ROOT, RUNNING, State

ENTRY = "benchmarks.gpu_lane.parts"
RESULTS = ROOT / "benchmarks" / "results"
CACHES = ROOT / "build" / "gpu-lane-caches"
CARRIED = ROOT / ".gpu-lane" / ARCHIVE
TOTAL_S = 540.0
"""A call of ten minutes, less the machine's start and the way back."""
LEAST_SHARE = 0.4
"""A part waits for the next call where less than this share of its limit is left."""
TAIL_LINES = 30
LOG_BYTES = 600 << 10
"""The end of each part's log goes into gpu_check.log: all parts together stay below 16 MiB."""
BUILD = "build"
"""The part whose product, the extension, is of this machine and does not travel with the records."""
FIGURES = "FIGURES "
"""Starts a line of a part's log that holds figures as JSON; they count even where the part fails."""


class Driver:
    """Runs parts one after the other and keeps the record."""

    def __init__(
        self,
        device: str,
        folder: Path,
        state: State,
        deadline: float,
        entry: str = ENTRY,
        dry: DryRun | None = None,
    ) -> None:
        """`folder`: scratch space for all parts. `deadline`: of the call, by time.monotonic(). `entry`:
        the module that runs a part. `dry`: judges the parts of a dry run."""
        self.device, self.folder, self.state, self.deadline = device, folder, state, deadline
        self.entry, self.dry = entry, dry
        self.started = time.monotonic()

    def run(self, part: Part) -> bool:
        """Run one part and put on file what it found; False where there is no time for it."""
        limit_s = part.limit_s if self.device == "cuda" else part.cpu_limit_s
        assert limit_s is not None, f"{part.name} does not run on {self.device}"
        if self.dry is not None:
            limit_s = dry_run.LIMIT_S
            self.dry.begin()
        left_s = self.deadline - time.monotonic()
        if left_s < LEAST_SHARE * limit_s:
            return False
        self.state.record(part.name, status=RUNNING, limit_s=min(limit_s, left_s))
        command = ["-m", self.entry, part.name]
        command += ["--device", self.device, "--folder", str(self.folder)]
        log = self.folder / f"{part.name}.log"
        (self.folder / "state.json").write_text(json.dumps(self.state.parts))
        code, seconds = run_limited(command, log, min(limit_s, left_s))
        text = log.read_text(errors="replace")
        record: dict[str, Any] = {"seconds": round(seconds, 1), "figures": read_figures(text)}
        if self.dry is not None:
            record |= self.dry.judge(code, text)
        elif code == 0:
            record["status"] = PASSED
        elif code is None and left_s < limit_s:
            record |= {"status": CUT, "why": "the call's own time ended"}
        else:
            why = f"killed at its limit of {limit_s:g} s" if code is None else f"exit code {code}"
            record |= {"status": FAILED, "why": why}
        tail = [line for line in text.splitlines() if not line.startswith(FIGURES)][-TAIL_LINES:]
        if record["status"] != PASSED:
            # The record is committed; the paths of this machine say nothing there.
            names = {str(self.folder): "FOLDER", str(ROOT): "ROOT", sys.prefix: "PYTHON"}
            record["log_tail"] = [replace_all(line, names) for line in tail]
        self.keep_log(part.name, text)
        self.state.record(part.name, **record)
        self.tell(part.name, record, tail)
        return True

    def keep_log(self, name: str, text: str) -> None:
        for folder in self.state.folders:
            with open(folder / "gpu_check.log", "a") as sink:
                sink.write(f"==== {name}, call {self.state.num_calls}\n{text[-LOG_BYTES:]}\n")

    def tell(self, name: str, record: dict[str, Any], tail: list[str]) -> None:
        """One plain line; of a part that did not pass, the end of its log before it."""
        status, figures = record["status"], record["figures"]
        if status != PASSED:
            print("\n".join([f"-- {name}: the end of its log:", *tail]))
        words = f"{status} after {record['seconds']:g} s"
        says = record.get("why") or figures.get("says") or json.dumps(figures)[:300]
        at = time.monotonic() - self.started
        print(f"[{at:5.0f} s] {name}: {words}: {says}", flush=True)


def replace_all(text: str, names: Mapping[str, str]) -> str:
    """Return `text` with each key of `names` replaced by its value."""
    for old, new in names.items():
        text = text.replace(old, new)
    return text


def read_figures(text: str) -> dict[str, Any]:
    """What a part has said so far: every line of figures, later ones over earlier ones."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(FIGURES):
            try:
                found |= json.loads(line.removeprefix(FIGURES))
            except ValueError:
                continue  # the part was killed while it wrote this line
    return found


def close(state: State, parts: Mapping[str, Part], names: list[str], device: str) -> int:
    """The last lines; returns the exit code. `names` of `parts` were asked for."""
    here = [name for name in names if runs_on(parts[name], device)]
    status = {name: state.parts.get(name, {}).get("status") for name in here}
    passed = [name for name in here if state.has_passed(name)]
    failed = [name for name in here if status[name] == FAILED]
    left = [name for name in here if name not in passed and name not in failed]
    if earlier := [name for name in passed if state.parts[name]["call"] < state.num_calls]:
        print(f"passed in an earlier call, with the same code: {', '.join(earlier)}")
    if away := [name for name in names if name not in here]:
        print(f"these need a GPU: {', '.join(away)}")
    if left:
        file = state.folders[0] / "gpu_check.json" if state.folders else "gpu_check.json"
        print(f"not reached: {', '.join(left)}; a call that finds {file} goes on there")
    num_skipped = len(parts) - len(passed) - len(failed)
    print(f"{len(passed)} passed, {len(failed)} failed, {num_skipped} skipped", flush=True)
    return 1 if failed else 0


def runs_on(part: Part, device: str) -> bool:
    return device == "cuda" or part.cpu_limit_s is not None


def end_on_signals(state: State) -> None:
    """A call that is told to end puts the running part on file as cut, and ends its processes."""

    def end(number: int, _: object) -> NoReturn:
        for name, record in list(state.parts.items()):
            if record["status"] == RUNNING and record["call"] == state.num_calls:
                state.record(name, status=CUT, why=f"the call got {signal.Signals(number).name}")
        raise SystemExit(128 + number)  # run_limited kills the part on its way out

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)


def has_gpu() -> bool:
    """Asked in a process of its own, so that a broken driver cannot take this one with it."""
    command = [sys.executable, "-c", "import torch; assert torch.cuda.is_available()"]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.returncode == 0


def parse(arguments: list[str] | None, parts: Mapping[str, Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--dry-run", action="store_true", help="without a GPU: each part up to its first CUDA call"
    )
    parser.add_argument(
        "--caches", type=Path, help=f"{ARCHIVE} of an earlier call; by default in .gpu-lane/"
    )
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="by default $OUT")
    parser.add_argument("--resume", type=Path, help="gpu_check.json of an earlier call")
    parser.add_argument("--afresh", action="store_true", help="run what has passed once more")
    parser.add_argument(
        "--total-s",
        type=float,
        help=f"seconds of this call: {TOTAL_S:g}, or without end in a dry run",
    )
    parser.add_argument("--spent-s", type=float, default=0.0, help="of them, already gone")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.parts) - set(parts)):
        parser.error(f"unknown part {unknown[0]!r}; expected some of {', '.join(parts)}")
    if options.resume is not None and not options.resume.is_file():
        parser.error(f"--resume: there is no file {options.resume}")
    if options.caches is not None and not options.caches.is_file():
        parser.error(f"--caches: there is no file {options.caches}")
    if options.dry_run:
        if options.device != "cuda":
            parser.error("--dry-run rehearses a GPU; --device cpu has no use for it")
        if why := dry_run.refusal():
            parser.error(why)
    elif options.device == "cuda" and not has_gpu():
        parser.error(
            "torch sees no CUDA device; --device cpu runs the same code on a toy model, and --dry-run "
            "this code up to the first CUDA call"
        )
    if options.total_s is None:
        options.total_s = math.inf if options.dry_run else TOTAL_S
    return options


def set_threads(device: str) -> None:
    """Give each process of a GPU machine all cores, unless the environment says otherwise.

    On a CPU each has one: a toy model is many times slower on two.
    """
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(cores) if device == "cuda" else "1")


def has_extension() -> bool:
    """Whether `mrl._C` is there for this interpreter: what `build` made on another machine is not."""
    return (ROOT / "mrl" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").is_file()


def main(
    arguments: list[str] | None = None,
    parts: Mapping[str, Part] = BY_NAME,
    entry: str = ENTRY,
) -> int:
    options = parse(arguments, parts)
    on_gpu = options.device == "cuda" and not options.dry_run
    folders = [options.out] if options.out is not None else []
    if on_gpu:
        folders.append(RESULTS)
    earlier = options.resume or next(
        (f / "gpu_check.json" for f in folders[::-1] if (f / "gpu_check.json").is_file()), None
    )
    device = dry_run.DEVICE if options.dry_run else options.device
    state = State(device, folders, None if options.afresh else earlier)
    if state.note:
        print(state.note)
    names = options.parts or list(parts)
    first = {BUILD} if BUILD in parts and not has_extension() else set()
    names = [*sorted(first), *(name for name in names if name not in first)]
    deadline = time.monotonic() + options.total_s - options.spent_s
    set_threads(options.device)
    end_on_signals(state)
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="gpu-lane-") as folder, contextlib.ExitStack() as stack:
        dry = DryRun(Path(folder)) if options.dry_run else None
        archive = options.caches or (CARRIED if CARRIED.is_file() else None)
        kept = Caches(CACHES, archive, options.out) if on_gpu else None
        if kept is not None:
            stack.callback(kept.pack)
            stack.callback(end_children)  # before that: they may be writing
        driver = Driver(options.device, Path(folder), state, deadline, entry, dry)
        asked = [name for name in names if runs_on(parts[name], options.device)]
        for name in state.order(asked, first):
            driver.run(parts[name])
            end_children()
            if kept is not None:
                kept.pack()
    return close(state, parts, names, options.device)


if __name__ == "__main__":
    sys.exit(main())
