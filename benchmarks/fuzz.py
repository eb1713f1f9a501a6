"""This module feeds damaged inputs to every parser of bytes from outside: `make fuzz`.

Each input is a valid one with a few changes, made from a printed seed. It may be refused with the
foreseen exception, or accepted where what comes back keeps the parser's promises; a digest must
notice every change. Any other exception, a crash, more memory than the limit and an input that takes
longer than its limit are faults. `--parser NAME --only N --seed S` tries one input again.
Writes runs/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import fcntl
import multiprocessing
import resource
import shutil
import struct
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.evidence.result import finish, summary, write_result
from benchmarks.fuzz_parsers.base import Parser, fault_of, input_of
from benchmarks.fuzz_parsers.bodies import PARSERS as BODIES
from benchmarks.fuzz_parsers.files import PARSERS as FILES
from benchmarks.fuzz_parsers.requests import PARSERS as REQUESTS
from benchmarks.fuzz_parsers.wire import PARSERS as WIRE

PARSERS = (*FILES, *WIRE, *BODIES, *REQUESTS)
LIMIT_S = 10.0
"""Seconds for one input; the machine may be loaded."""
MEMORY_BYTES = 2 << 30
"""Address space that a process may take beside what it has at its start."""
KEPT = 20
"""Faults of one parser that are kept with their number."""


def try_inputs(
    parser: Parser, seed: int, numbers: Sequence[int], folder: Path, seconds: float = float("inf")
) -> tuple[int, list[tuple[int, str]]]:
    """Try inputs in this process until the seconds are over; return (how many, (number, fault)...)."""
    faults, end, count = [], time.monotonic() + seconds, 0
    for number in numbers:
        if time.monotonic() > end:
            break
        if fault := fault_of(parser, input_of(parser, seed, number), folder):
            faults.append((number, fault))
        count += 1
    return count, faults


def _child(
    parser: Parser, seed: int, start: int, end: float, folder: Path, at: Any, out: Any
) -> None:
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    number, faults = start, []
    while number == start or time.monotonic() < end:  # one at least, however late it started
        at.value = number
        faults += try_inputs(parser, seed, [number], folder)[1]
        number += 1
    out.send((number, faults[:KEPT], Counter(_kind(text) for _, text in faults)))


def _kind(fault: str) -> str:
    return fault.partition(":")[0]


def fuzz(parser: Parser, seed: int, seconds: float) -> dict[str, Any]:
    """Try inputs for some seconds in a process of their own; one that dies or hangs is replaced."""
    context = multiprocessing.get_context("fork")
    end, start = time.monotonic() + seconds, 0
    row: dict[str, Any] = {"parser": parser.name, "inputs": 0, "faults": []}
    kinds: Counter[str] = Counter()
    while time.monotonic() < end:
        at = context.Value("q", start, lock=False)
        receive, send = context.Pipe(duplex=False)
        folder = Path(tempfile.mkdtemp(prefix="mrl-fuzz-"))
        child = context.Process(target=_child, args=(parser, seed, start, end, folder, at, send))
        child.start()
        send.close()
        died = _watch(child, at, receive)
        if died:
            row["faults"].append([at.value, died])
            kinds[_kind(died)] += 1
            start = at.value + 1
        else:
            start, faults, counted = receive.recv()
            row["faults"] += faults
            kinds.update(counted)
        child.join()
        shutil.rmtree(folder, ignore_errors=True)
    return {**row, "inputs": start, "faults": row["faults"][:KEPT], "kinds": dict(kinds)}


def _watch(child: Any, at: Any, receive: Any) -> str:
    """Wait for the child's report; return how it ended where it made none."""
    last, since = at.value, time.monotonic()
    while not receive.poll(0.2):
        if at.value != last:
            last, since = at.value, time.monotonic()
        elif time.monotonic() - since > LIMIT_S:
            child.kill()
            return f"hang: no end after {LIMIT_S:.0f} s"
    return "" if _has_report(receive) else _how(child)


def _has_report(receive: Any) -> bool:
    """Return whether bytes wait in the pipe, and not only its end."""
    found = fcntl.ioctl(receive.fileno(), termios.FIONREAD, b"\0" * 4)
    return struct.unpack("i", found)[0] > 0


def _how(child: Any) -> str:
    child.join()
    return f"crash: exit code {child.exitcode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=summary(__doc__))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parser", choices=[each.name for each in PARSERS])
    parser.add_argument("--only", type=int, help="the number of one input of --parser")
    args = parser.parse_args()
    chosen = [each for each in PARSERS if args.parser in (None, each.name)]
    print(f"seed {args.seed}")
    if args.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(input_of(chosen[0], args.seed, args.only))
            finish(
                *_verdict(
                    fault_of(chosen[0], input_of(chosen[0], args.seed, args.only), Path(folder))
                )
            )
    rows, shares = [], sum(each.share for each in chosen)
    for each in chosen:
        rows.append(fuzz(each, args.seed, args.minutes * 60 * each.share / shares))
        print(
            f"{each.name:<20}{rows[-1]['inputs']:>10} inputs  {rows[-1]['kinds'] or 'no fault'}",
            flush=True,
        )
        for number, fault in rows[-1]["faults"][:3]:
            print(f"    {number}: {fault}")
    failed = sum(bool(row["faults"]) for row in rows)
    total = sum(row["inputs"] for row in rows)
    print(f"{total} inputs")
    if args.parser is None:
        content = {"seed": args.seed, "inputs": total, "rows": rows}
        write_result("fuzz", content, passed=len(rows) - failed, failed=failed,
                     packages=("torch", "safetensors", "pyarrow"))  # fmt: skip
    finish(len(rows) - failed, failed)


def _verdict(fault: str) -> tuple[int, int]:
    print(fault or "no fault")
    return (0, 1) if fault else (1, 0)


if __name__ == "__main__":
    main()
