"""Runs of a study, made in worker processes: a study that was interrupted continues where it was.

FOLDER/settings.json says what its results have in common, and each finished run is a line of
FOLDER/results.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mrl.system.json_worker import JsonWorker, WorkerLost
from studies.stability_study.arms import Job

NUM_WORKERS = 2
"""The most worker processes; each has a core of its own."""
WORKER = "studies.stability_study.worker"
RUN_TIMEOUT_S = 1200.0
Result = dict[str, Any]


def open_results(folder: Path, settings: dict[str, Any], *, fresh: bool) -> list[Result]:
    """Make the folder of a study, and return the results that are on file there. Exits if they were
    made with other settings; `fresh` forgets them instead."""
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    file, wanted = folder / "settings.json", json.dumps(settings, indent=1)
    if file.exists() and file.read_text() != wanted:
        sys.exit(
            f"error: {folder} holds a study of other settings; give --fresh, or another --folder"
        )
    file.write_text(wanted)
    return read_lines(folder / "results.jsonl")


def read_lines(file: Path) -> list[Result]:
    """Return all whole lines: the last one may have been cut short."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def make_missing(
    folder: Path,
    results: list[Result],
    missing: Iterable[Job],
    tell: Callable[[Result], str],
    *,
    num_workers: int = NUM_WORKERS,
    worker: str = WORKER,
    timeout_s: float = RUN_TIMEOUT_S,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Make the runs `missing`, and add each to `results` and to FOLDER/results.jsonl.

    A result has the columns of its job, and those of `more`. A line is printed for each run: the
    number of results, minutes, and what `tell` says of its result. Returns a line for each run that
    failed. `worker` and `timeout_s` are those of `run_all`.
    """
    start, failed = time.monotonic(), []
    file = folder / "results.jsonl"
    if file.exists():  # drop a line that was cut short, or the next one would be added to it
        file.write_text("".join(json.dumps(line) + "\n" for line in read_lines(file)))
    for job, found in run_all(folder, missing, num_workers, worker, timeout_s):
        if isinstance(found, str):
            failed.append(f"{job.name}: {found}")
            print(f"FAILED {failed[-1]}", flush=True)
            continue
        result = job.columns | found | dict(more)
        results.append(result)
        with file.open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        minutes = (time.monotonic() - start) / 60
        print(f"[{len(results)} runs, {minutes:.1f} min] {tell(result)}", flush=True)
    return failed


def run_all(
    folder: Path,
    wanted: Iterable[Job],
    num_workers: int = NUM_WORKERS,
    worker: str = WORKER,
    timeout_s: float = RUN_TIMEOUT_S,
) -> Iterator[tuple[Job, Result | str]]:
    """Yield each result as it comes, or why there is none. With one worker it has all cores.

    `worker` is the module of the worker process. A run that takes longer than `timeout_s` is lost.
    """
    waiting: queue.Queue[Job] = queue.Queue()
    done: queue.Queue[tuple[Job, Result | str] | None] = queue.Queue()
    for job in wanted:
        waiting.put(job)
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    shares = ["+".join(cores)] if num_workers == 1 else cores[:num_workers]

    def work(share: str) -> None:
        _work(share, folder, worker, timeout_s, waiting, done)

    threads = [
        # Daemons: after Ctrl-C nothing is waited for, and the workers die with their threads.
        threading.Thread(target=work, args=(share,), daemon=True)
        for share in shares[: waiting.qsize()]
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        while (one := done.get()) is not None:
            yield one
    for thread in threads:
        thread.join()


def _work(
    cores: str,
    folder: Path,
    module: str,
    timeout_s: float,
    waiting: queue.Queue[Job],
    done: queue.Queue[Any],
) -> None:
    """Run job after job in one worker process, from a thread; the worker exits when the thread ends.
    `cores` are those of the worker, such as `0` or `0+1`."""
    worker = JsonWorker(module, "study", str(folder), cores)
    try:
        while True:
            job = waiting.get_nowait()
            shutil.rmtree(job.folder, ignore_errors=True)
            try:
                done.put((job, worker.call(dataclasses.asdict(job), timeout_s)))
            except WorkerLost as error:
                done.put((job, f"the worker was lost: {error}; see {folder}/worker_{cores}.log"))
            shutil.rmtree(job.folder, ignore_errors=True)
    except queue.Empty:
        pass
    finally:
        worker.close()
        done.put(None)
